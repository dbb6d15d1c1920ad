"""Extra memory of saving, as a share of the state: ``python -m benchmarks.memory [--quick]``.

Each engine runs in a fresh process. A watcher adds up the proportional set size (PSS, ``smaps_rollup``) of that process and of everything it has
started: memory that a rank shares with its courier counts once. Extra = the highest sum while saving - the highest sum while the same process
trained without saving (so the temporaries of a step do not count).
Two uses: a save at a time, on a local disk; and four saves requested without waiting (for us: against a slow S3 store, too).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.commit import behind_shaper
from benchmarks.engines import ENGINES, process_group
from benchmarks.report import Bar, report
from benchmarks.shaper import Shape
from benchmarks.workload import gpt
from torchrelay import Checkpointer, TrainingState

_PEERS = ("dcp", "dcp-process")
_EVERY_S = 0.05  # between two looks
_SLOW_BYTES_S = 20e6  # of each connection of the slow store


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small state (the interpreters weigh more than it does)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = ("torchrelay", *_PEERS)
    one = {name: _extra(name, "one", quick=args.quick) for name in names}
    four = {name: _extra(name, "four", quick=args.quick) for name in names}
    slow = _extra("torchrelay", "slow", quick=args.quick)
    bars = [
        Bar(figure="one save at a time: extra memory / state", value=one["torchrelay"], bar=1.1, detail=one),
        Bar(figure="four saves requested: extra memory / state", value=four["torchrelay"], bar=2.0, detail=four),
        Bar(figure="four saves requested, slow S3: extra memory / state", value=slow, bar=2.0),
    ]
    report("memory", bars, out=args.out)


def _extra(name: str, use: str, *, quick: bool) -> float:
    """Run one engine in its own process; returns the extra memory as a share of the state."""
    if use == "slow":
        # The server and its shaper belong to this process, so they are not counted.
        with behind_shaper(Shape(rate_bytes_s=_SLOW_BYTES_S / (10 if quick else 1))):
            return _watched(name, use, quick=quick)
    return _watched(name, use, quick=quick)


def _watched(name: str, use: str, *, quick: bool) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_trainer, args=(theirs, name, use, quick))
    process.start()
    theirs.close()
    try:
        size: int = ours.recv()
        watch = _Watch(process.pid or 0)
        ours.send("train")
        ours.recv()
        baseline = watch.reset()
        ours.send("save")
        ours.recv()
        peak = watch.stop()
        process.join()
    finally:
        process.kill()
        process.join()
    return round((peak - baseline) / size, 3)


def _trainer(pipe: Connection, name: str, use: str, quick: bool) -> None:
    torch.set_num_threads(1)
    workload = gpt(quick=quick)
    pipe.send(workload.size_bytes)
    pipe.recv()
    for _ in range(3):
        workload.step()
    pipe.send("trained")
    pipe.recv()
    if use == "slow":
        state = TrainingState(model=workload.model, optimizer=workload.optimizer)
        with Checkpointer(state, run="bench", store="") as checkpointer:
            for step in range(4):
                checkpointer.save(step + 1)
            workload.step()
    else:
        with tempfile.TemporaryDirectory() as folder, process_group():
            engine = ENGINES[name](workload, Path(folder))
            for step in range(4):
                engine.save(step + 1)
                if use == "one":
                    workload.step(engine.join)
                    engine.wait()
            engine.wait()
            engine.close()
    pipe.send("done")


class _Watch:
    """Samples the memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid, self._stopping = pid, threading.Event()
        self._peak = _pss(pid)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self._peak = max(self._peak, _pss(self._pid))

    def reset(self) -> int:
        """Return the highest sum so far, in bytes, and begin anew."""
        peak, self._peak = self._peak, 0
        return peak

    def stop(self) -> int:
        """Return the highest sum seen, in bytes."""
        self._stopping.set()
        self._thread.join()
        return self._peak


def _pss(pid: int) -> int:
    """PSS of a process and its descendants in bytes."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
            tasks = os.listdir(f"/proc/{one}/task")
            for task in tasks:
                waiting += [int(child) for child in Path(f"/proc/{one}/task/{task}/children").read_text().split()]
        except OSError:
            continue  # it has ended
        total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return total


if __name__ == "__main__":
    main()
