"""Driving a real launcher in tests: start it as its parent would, watch its events, kill by pid, look into the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.waiting import wait_until
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.reader import load_manifest, loss_trace
from torchrelay.checkpoint.regions import read_tensors
from torchrelay.config import FaultSpec, RunSpec, SaveSpec, TrainSpec, WorldSpec, spec_to_dict
from torchrelay.relay import Outcome
from torchrelay.store import open_store

__all__ = ["Launch", "final_state", "tiny_spec", "train_to_the_end"]


def tiny_spec(
    store: str, run_id: str, *, ranks: int = 1, steps: int = 30, interval: int = 10, workers: int = 0, **options: Any
) -> TrainSpec:
    """A run of the tiny job that takes seconds."""
    return TrainSpec(
        run=RunSpec(
            run_id=run_id, job="torchrelay.testing.tiny:build", options=options, total_steps=steps, global_batch=12
        ),
        segment_steps=steps,
        world=WorldSpec(ranks=ranks, loader_workers=workers),
        save=SaveSpec(interval_steps=interval),
        faults=FaultSpec(lease_s=3.0, grace_s=30.0, drain_s=15.0, retry_delay_s=0.0),
        store=store,
    )


class Launch:
    """A launcher process and what it has said so far."""

    def __init__(self, spec: TrainSpec, *, stop_step: int | None = None, environ: dict[str, str] | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchrelay.launch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environ or {})},
        )
        request = {
            "spec": spec_to_dict(spec),
            "stop_step": stop_step or spec.run.total_steps,
            "origin": "test",
            "why": "a test",
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def pids(self, role: str) -> list[int]:
        """Process ids started so far."""
        return [event["pid"] for event in list(self.events) if event["event"] == "process" and event["role"] == role]

    def wait_for(
        self, condition: Callable[[dict[str, Any]], bool], *, timeout_s: float = 90.0, what: str = "an event"
    ) -> dict[str, Any]:
        """Wait for an event that meets the condition."""
        wait_until(
            lambda: any(condition(event) for event in list(self.events)) or self._ended(),
            timeout_s=timeout_s,
            what=what,
        )
        found = [event for event in self.events if condition(event)]
        assert found, f"{what} never came: {self.events[-5:]}"
        return found[0]

    def wait_committed(self, step: int) -> None:
        """Wait until a checkpoint at or after ``step`` is committed."""
        self.wait_for(
            lambda event: event["event"] == "saved" and event["state"] == "committed" and event["step"] >= step,
            what=f"the commit of step {step}",
        )

    def kill(self) -> None:
        """SIGKILL the launcher; what it has started must end by itself."""
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        self._close()

    def outcome(self, *, timeout_s: float = 90.0) -> Outcome:
        """Wait for the launcher's last word."""
        self.process.wait(timeout_s)
        self._reader.join(10)
        self._close()
        assert self.events, "the launcher said nothing"
        assert self.events[-1]["event"] == "outcome", self.events[-3:]
        return Outcome.from_dict(self.events[-1])

    def all_gone(self) -> bool:
        """Whether the launcher and all that it started have ended."""
        return all(_is_gone(pid) for pid in [self.process.pid, *self.pids("rank"), *self.pids("courier")])

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _ended(self) -> bool:
        return self.process.poll() is not None and not self._reader.is_alive()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))


def train_to_the_end(spec: TrainSpec, *, tries: int = 6) -> list[Outcome]:
    """Launch again and again, as a flow would, until the run is complete."""
    outcomes: list[Outcome] = []
    while not outcomes or outcomes[-1].kind != "completed":
        assert len(outcomes) < tries, outcomes
        outcomes.append(Launch(spec).outcome(timeout_s=150))
    return outcomes


def final_state(store_url: str, run_id: str) -> tuple[Any, ...]:
    """Everything the newest checkpoint holds, comparable with ``==``: losses, state, data position and ledger, and every tensor's bytes."""
    store = open_store(store_url)
    latest = read_history(store, run_id).latest
    assert latest is not None
    manifest = load_manifest(store, run_id, latest)
    buffers = {name: bytearray(meta.size_bytes) for name, meta in manifest.tensors.items()}
    read_tensors(store, manifest, {name: memoryview(buffer) for name, buffer in buffers.items() if buffer})
    return (
        latest.step,
        loss_trace(store, run_id),
        manifest.state,
        manifest.data,
        {name: bytes(buffer) for name, buffer in buffers.items()},
    )


def renamed(spec: TrainSpec, run_id: str, **options: Any) -> TrainSpec:
    """The same run under another name, with other options."""
    return replace(spec, run=replace(spec.run, run_id=run_id, options=options))


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True
