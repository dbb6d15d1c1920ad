"""Serve the deployments from one process, for a machine without workers: ``python -m flows.serve`` (``torchrelay up`` starts it).

``prefect.yaml`` describes the same deployments for work pools.
"""

from __future__ import annotations

import asyncio

import httpx
from prefect import aserve
from prefect.deployments.runner import RunnerDeployment
from prefect.settings import PREFECT_API_URL

from flows.train import train
from flows.upkeep import upkeep

__all__ = ["deployments", "main"]

_WAIT_S = 120.0
_NIGHTLY = "0 2 * * *"
_HOURLY = "20 * * * *"


async def main() -> None:
    """Wait for the server, register the deployments and run what is asked for, until told to stop."""
    await _await_server()
    await aserve(
        *await deployments(),
        pause_on_shutdown=False,  # an inactive schedule stays what it was, an active one goes on with the next start
        print_starting_message=False,
    )


async def deployments() -> list[RunnerDeployment]:
    """Return what is served."""
    return [
        await train.ato_deployment(
            "train",
            description="Train a run, or go on with it. The same spec again continues the run.",
            tags=["torchrelay"],
        ),
        await train.ato_deployment(
            "nightly",
            description="Go on with a run each night at two. Put your spec into its parameters and switch the schedule on.",
            tags=["torchrelay"],
            parameters={"spec": {"run": {"run_id": "nightly"}}},
            cron=_NIGHTLY,
            paused=True,
        ),
        await upkeep.ato_deployment(
            "upkeep",
            description="Each hour: verify checkpoints, forget superseded ones, sweep. Put your policy into its parameters and switch it on.",
            tags=["torchrelay"],
            parameters={"spec": {}},
            cron=_HOURLY,
            paused=True,
        ),
    ]


async def _await_server() -> None:
    """Return when the server is ready: it may have been started in the same moment as this process."""
    async with asyncio.timeout(_WAIT_S), httpx.AsyncClient(timeout=5) as client:
        while True:
            try:
                if (await client.get(f"{PREFECT_API_URL.value()}/ready")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    asyncio.run(main())
