"""``torchrelay demo``: the whole promise in two minutes, on this machine.

A small language model learns from Python's own sources on two ranks, through Prefect and a real object store. A rank is killed with SIGKILL, then
the whole flow process; both times the run goes on from its last checkpoint. An unbroken twin is trained beside it, and every loss and every
byte of the final state are compared. Exit code 1 if they differ.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torchrelay.checkpoint.generation import read_lease
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.reader import load_manifest, loss_trace
from torchrelay.checkpoint.regions import read_tensors
from torchrelay.cli.console import find_home, print_table, read_env_file, say
from torchrelay.cli.prefect_api import FlowRun, PrefectAPI
from torchrelay.cli.stack import up
from torchrelay.config import RunSpec, SaveSpec, TrainSpec, WorldSpec, spec_to_dict
from torchrelay.errors import ConfigError, TorchrelayError
from torchrelay.relay import RunStatus, read_status
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["add_parsers"]

_DEADLINE_S = 300.0
_MIN_STEPS = 150


def add_parsers(subparsers: Any) -> None:
    """Add the ``demo`` command."""
    parser = subparsers.add_parser(
        "demo", help="train a small model, kill it twice, and prove that nothing was lost", description=__doc__
    )
    parser.add_argument("--steps", type=int, default=450, help="optimizer steps (default: 450)")
    parser.add_argument("--ranks", type=int, default=2, help="rank processes (default: 2)")
    parser.set_defaults(handler=_demo)


def _demo(args: argparse.Namespace) -> int:
    if args.steps < _MIN_STEPS:
        raise ConfigError(f"--steps {args.steps} leaves no time for two kills", hint=f"at least {_MIN_STEPS}")
    began = time.monotonic()
    say("starting the object store, the Prefect server and the flows (torchrelay up)")
    home = find_home()
    up(home)
    # The stack's own settings, whatever store or server the environment names.
    environ = {**os.environ, **read_env_file(home / "env"), "TORCHRELAY_HOME": str(home)}
    store = open_store("", environ=environ)
    stamp = time.strftime("%y%m%d-%H%M%S")
    spec = TrainSpec(
        run=RunSpec(run_id=f"demo-{stamp}", total_steps=args.steps, global_batch=24),
        segment_steps=max(1, args.steps // 2),
        world=WorldSpec(ranks=args.ranks),
        save=SaveSpec(interval_steps=max(1, args.steps // 15)),
    )
    started = time.monotonic()
    _broken_run(store, spec, environ)
    took_s = time.monotonic() - started
    twin = dataclasses.replace(
        spec, run=dataclasses.replace(spec.run, run_id=f"demo-{stamp}-twin"), segment_steps=args.steps
    )
    say(f"training the unbroken twin {twin.run.run_id}: the same spec, one segment, nobody is killed")
    _train_here(twin, environ)
    equal = _report(store, spec, twin, took_s)
    say(
        f"all of it took {time.monotonic() - began:.0f} s. The page of the run: torchrelay show {spec.run.run_id}; stop the servers: make down"
    )
    return 0 if equal else 1


def _broken_run(store: ObjectStore, spec: TrainSpec, environ: dict[str, str]) -> None:
    run, interval = spec.run.run_id, spec.save.interval_steps
    prefect = PrefectAPI(environ)
    say(
        f"starting the flow train for {run}: {spec.run.total_steps} steps on {spec.world.ranks} ranks, "
        f"a checkpoint every {interval} steps"
    )
    flow_run = prefect.start(spec)
    say(f"watch it at {flow_run.url}")
    watch = _Watch(store, run, prefect, flow_run)
    watch.until(lambda status: status.committed_step >= 3 * interval, "the first checkpoints")
    launcher = _launcher_pid(store, run)
    rank = _child(launcher, "torchrelay.worker")
    step = watch.step
    os.kill(rank, signal.SIGKILL)
    say(f"step {step} is committed: killed rank process {rank} with SIGKILL")
    watch.until(lambda status: len(status.generations) >= 2 and status.committed_step > step, "the next generation")
    step = watch.step
    flow = _parent(_launcher_pid(store, run))
    os.kill(flow, signal.SIGKILL)
    say(f"step {step} is committed: killed the whole flow process {flow} with SIGKILL")
    watch.flow_run = None
    watch.until(lambda status: status.generations[-1].outcome is not None, "the orphaned launcher to stop")
    say("starting the same spec again, as a schedule or a person would: the store knows where to go on")
    watch.flow_run = prefect.start(spec)
    watch.until(lambda status: status.finished, "the run to finish")


class _Watch:
    """Waits for conditions of a run, shows each new committed step, and gives up at once when the flow run has ended badly."""

    def __init__(self, store: ObjectStore, run: str, prefect: PrefectAPI, flow_run: FlowRun) -> None:
        self._store, self._run, self._prefect = store, run, prefect
        self.flow_run: FlowRun | None = flow_run
        self.step = 0

    def until(self, condition: Callable[[RunStatus], bool], what: str) -> None:
        """Return when the condition holds. Raises TorchrelayError when the flow run failed, or after the deadline."""
        deadline, asked = time.monotonic() + _DEADLINE_S, time.monotonic()
        while True:
            status = read_status(self._store, self._run)
            if status.committed_step > self.step:
                self.step = status.committed_step
                say(f"  committed step {self.step}")
            if status.generations and condition(status):
                return
            if time.monotonic() > deadline:
                raise TorchrelayError(
                    f"waited {_DEADLINE_S:.0f} s for {what}",
                    hint=f"torchrelay show {self._run}; logs are in .torchrelay/logs",
                )
            if self.flow_run is not None and time.monotonic() - asked > 1:
                asked = time.monotonic()
                state = self._prefect.state(self.flow_run.id)
                if state.ended and state.type != "COMPLETED":
                    raise TorchrelayError(f"the flow run ended as {state.name}: {state.message}")
            time.sleep(0.1)


def _train_here(spec: TrainSpec, environ: dict[str, str]) -> None:
    """Train without Prefect, through the same command a user has."""
    path = Path(environ["TORCHRELAY_HOME"]) / f"{spec.run.run_id}.toml"
    path.write_text(_toml(spec_to_dict(spec)), encoding="utf-8")
    try:
        subprocess.run(
            [sys.executable, "-m", "torchrelay.cli", "train", str(path), "--local"],
            check=True,
            env={**os.environ, **environ},
        )
    finally:
        path.unlink()


def _toml(tree: dict[str, Any], prefix: str = "") -> str:
    """Write a spec as TOML; its values are strings, numbers and tables only."""
    plain = "".join(f"{name} = {json.dumps(value)}\n" for name, value in tree.items() if not isinstance(value, dict))
    tables = ((f"{prefix}{name}", value) for name, value in tree.items() if isinstance(value, dict))
    return plain + "".join(f"\n[{name}]\n{_toml(value, f'{name}.')}" for name, value in tables)


def _report(store: ObjectStore, spec: TrainSpec, twin: TrainSpec, took_s: float) -> bool:
    run = spec.run.run_id
    losses, expected = loss_trace(store, run), loss_trace(store, twin.run.run_id)
    same_losses = losses == expected and len(losses) == spec.run.total_steps
    same_state = _state_equal(store, run, twin.run.run_id)
    rows, stalls, lost = [], [], []
    summaries = read_status(store, run).generations
    for summary, following in zip(summaries, [*summaries[1:], None], strict=True):
        outcome = summary.outcome
        last = outcome.last_step if outcome else summary.begin_step
        lost_steps = max(0, last - following.begin_step) if following else 0
        lost.append(lost_steps)
        stalls += [outcome.stats["stall_s_max"]] if outcome and "stall_s_max" in outcome.stats else []
        rows.append(
            [str(summary.number), str(summary.begin_step), str(last), outcome.kind if outcome else "?", str(lost_steps)]
        )
    print_table(["generation", "began at", "reached", "ended", "steps lost"], rows)
    bounded = max(lost) <= spec.save.interval_steps
    first, last_loss = losses[0][1] or 0.0, losses[-1][1] or 0.0
    print_table(
        ["", ""],
        [
            ["kills", "2 (one rank, one flow process)"],
            ["steps lost and trained again", f"{sum(lost)} of {spec.run.total_steps}"],
            [f"at most {spec.save.interval_steps} of them per failure", _yes(bounded)],
            ["stall per save, worst", f"{max(stalls) * 1000:.1f} ms" if stalls else "not measured"],
            ["loss", f"{first:.2f} -> {last_loss:.2f} nats/byte"],
            ["time with both kills", f"{took_s:.0f} s"],
            [f"losses equal ({len(losses)} steps)", _yes(same_losses)],
            ["parameters equal (and optimizer state)", _yes(same_state)],
        ],
    )
    return same_losses and same_state and bounded


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _state_equal(store: ObjectStore, run: str, twin: str) -> bool:
    """Compare every tensor of the two final checkpoints, byte by byte, and the rest of the state as it is written."""
    states = []
    for run_id in (run, twin):
        latest = read_history(store, run_id).latest
        if latest is None:
            return False
        manifest = load_manifest(store, run_id, latest)
        arrays = {name: np.empty(meta.size_bytes, np.uint8) for name, meta in manifest.tensors.items()}
        read_tensors(store, manifest, {name: array.data for name, array in arrays.items() if array.size})
        states.append((manifest.ref.step, manifest.tensors, manifest.state, manifest.data, arrays))
    ours, theirs = states
    return ours[:4] == theirs[:4] and all(np.array_equal(ours[4][name], theirs[4][name]) for name in ours[4])


def _launcher_pid(store: ObjectStore, run: str) -> int:
    newest = read_history(store, run).newest
    lease = read_lease(store, run, newest.number) if newest else None
    if lease is None or lease.holder is None:
        raise TorchrelayError(f"run {run} has no live generation")
    return lease.holder.pid


def _child(parent: int, module: str) -> int:
    """Find a child process of the launcher by the module it runs."""
    for pid in _processes():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if module.encode() in command and _parent(pid) == parent:
                return pid
    raise TorchrelayError(f"process {parent} has no child that runs {module}")


def _processes() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])
