"""What one save costs the training thread, as a share of one memcpy of the state: ``python -m benchmarks.stall [--quick]``.

Stall = the call of ``save`` + the wait before the optimizer's update (``PendingCheckpoint.stall_s``). The limit is one plain copy of the
state into warm buffers, timed in the same turn. Two uses: forward and backward follow the save and are longer than the copy (it hides
behind them), or the update follows at once (nothing hides it). Peers run the overlapped use in the same turns, for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.engines import ENGINES, Engine, Torchrelay, process_group
from benchmarks.report import Bar, report
from benchmarks.workload import WORKLOADS, Warm, Workload

_PEERS = ("dcp", "dcp-kept", "dcp-process", "torch_checkpointing")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small states, five turns")
    parser.add_argument("--states", nargs="+", default=sorted(WORKLOADS), choices=sorted(WORKLOADS))
    parser.add_argument("--peers", nargs="*", default=_PEERS, choices=sorted(ENGINES))
    parser.add_argument("--turns", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bars: list[Bar] = []
    for name in args.states:
        workload = WORKLOADS[name](quick=args.quick)
        with tempfile.TemporaryDirectory() as folder, process_group():
            bars += _compare(workload, Path(folder), list(args.peers), turns=args.turns or (5 if args.quick else 7))
    report("stall", bars, out=args.out)


def _compare(workload: Workload, folder: Path, peers: list[str], *, turns: int) -> list[Bar]:
    warm, ours = Warm(workload), Torchrelay(workload, folder)
    others = [ENGINES[name](workload, folder) for name in peers]
    calls: dict[str, Callable[[int], float]] = {
        "memcpy": lambda step: warm.copy_s(),
        "overlapped": lambda step: _overlapped(ours, workload, step),
        "at once": lambda step: _at_once(ours, workload, step + 1),
    } | {engine.name: _peer(engine, workload) for engine in others}
    found: dict[str, list[float]] = {name: [] for name in calls}
    try:
        for turn in range(turns + 1):
            for name, call in calls.items():
                seconds = call(2 * turn + 1)
                if turn:  # the first one pays for buffers and processes
                    found[name].append(seconds)
    finally:
        for engine in (ours, *others):
            engine.close()
    return _bars(workload, found)


def _overlapped(engine: Torchrelay, workload: Workload, step: int) -> float:
    """Save, then one training step."""
    workload.step()
    engine.save(step)
    workload.step()
    return _stall(engine)


def _at_once(engine: Torchrelay, workload: Workload, step: int) -> float:
    """Save when the gradients are there already; the update follows."""
    workload.backward()
    engine.save(step)
    workload.optimizer.step()
    return _stall(engine)


def _stall(engine: Torchrelay) -> float:
    engine.wait()
    engine.tidy()
    assert engine.pending is not None
    return engine.pending.stall_s


def _peer(engine: Engine, workload: Workload) -> Callable[[int], float]:
    def call(step: int) -> float:
        workload.step()
        began = perf_counter()
        engine.save(step)
        stall = perf_counter() - began
        workload.backward()
        began = perf_counter()
        engine.join()
        stall += perf_counter() - began
        workload.optimizer.step()
        engine.wait()
        engine.tidy()
        return stall

    return call


def _bars(workload: Workload, found: dict[str, list[float]]) -> list[Bar]:
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    detail: dict[str, Any] = {"mib": round(workload.size_bytes / 2**20)} | {
        f"{name}_ms": [round(1000 * value, 2) for value in (medians[name], min(seconds), max(seconds))]
        for name, seconds in found.items()
    }
    bars = ((0.03, "overlapped"), (1.0, "at once"))
    return [
        Bar(
            figure=f"{workload.name}: stall / memcpy, {use}",
            value=medians[use] / medians["memcpy"],
            bar=bar,
            detail=detail,
        )
        for bar, use in bars
    ]


if __name__ == "__main__":
    main()
