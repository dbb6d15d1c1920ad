"""Running flows in processes of their own against a real Prefect server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay.config import TrainSpec, spec_to_dict

__all__ = ["Ended", "Flow"]

_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Final state of a flow run."""

    type: str
    message: str
    flow_run_id: str


class Flow:
    """Runs a flow in a process of its own against a real server."""

    def __init__(self, server_environ: Mapping[str, str]) -> None:
        self.environ = {
            **os.environ,
            **server_environ,
            "PYTHONPATH": str(_ROOT),
        }
        self.environ.pop("TORCHRELAY_STORE", None)

    def train(self, spec: TrainSpec | dict[str, Any]) -> Ended:
        """Run ``train`` to its end."""
        return self.run("train", spec_to_dict(spec) if isinstance(spec, TrainSpec) else spec)

    def run(self, name: str, spec: dict[str, Any]) -> Ended:
        """Run a flow to its end."""
        parameters = {"spec": spec}
        done = subprocess.run(
            [sys.executable, str(_ROOT / "tests/programs/run_flow.py"), name],
            input=json.dumps(parameters),
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return Ended(**json.loads(done.stdout.splitlines()[-1]))
