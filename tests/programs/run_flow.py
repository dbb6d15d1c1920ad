"""Run the flow that the argument names once, as Prefect's engine would: parameters come on stdin, the final state goes to stdout.

In a process of its own because Prefect's background threads leave sockets open, which tests here count as errors.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from flows.train import train
from flows.upkeep import upkeep


async def _run(parameters: dict[str, Any]) -> dict[str, Any]:
    call: Any = {"train": train, "upkeep": upkeep}[sys.argv[1]]
    state = await call(**parameters, return_state=True)
    flow_run_id = state.state_details.flow_run_id
    return {"type": state.type.value, "message": state.message, "flow_run_id": str(flow_run_id)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(json.load(sys.stdin)))), flush=True)
