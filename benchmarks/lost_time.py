"""Training time lost per save, beside DCP's in the same run: ``python -m benchmarks.lost_time [--quick]``.

A save is requested, then training goes on until it is durable, and for some steps more. Lost = seconds in the call + what every step of that
time took longer (waiting before the update included) than the median of the steps right after. Engines take turns; the first turn
is discarded. Three cases: ``gpt`` with one core free, ``gpt`` on both cores (nothing is free for the background), ``many`` (bound by the GIL).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.engines import ENGINES, Engine, Torchrelay, process_group
from benchmarks.report import Bar, report
from benchmarks.workload import WORKLOADS, Warm, Workload

_PEERS = ("dcp", "dcp-staging", "dcp-process")
_CASES = (("gpt", 1), ("gpt", 2), ("many", 1))  # workload, torch threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One save. ``blocked_s`` = the call and the wait before the next update; ``slower`` = mean step until durable / step right after."""

    blocked_s: float
    lost_s: float
    durable_s: float
    slower: float


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small states, three turns")
    parser.add_argument("--engines", nargs="+", default=["torchrelay", *_PEERS], choices=sorted(ENGINES))
    parser.add_argument("--case", type=int, choices=range(len(_CASES)), help="only this case")
    parser.add_argument(
        "--option", nargs="*", default=[], metavar="NAME=JSON", help="for our Checkpointer, such as caps"
    )
    parser.add_argument("--turns", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    Torchrelay.options.update(
        (name, json.loads(value)) for name, _, value in (item.partition("=") for item in args.option)
    )
    turns = args.turns or (3 if args.quick else 7)
    bars: list[Bar] = []
    for number, (name, threads) in enumerate(_CASES):
        if args.case in (None, number):
            torch.set_num_threads(threads)
            workload = WORKLOADS[name](quick=args.quick)
            with tempfile.TemporaryDirectory() as folder, process_group():
                found = compare(workload, Path(folder), args.engines, turns=turns)
            bars += _bars(f"{name}, {'one core free' if threads == 1 else 'no core free'}", found, workload)
    report("lost_time", bars, out=args.out)


def compare(workload: Workload, folder: Path, names: Sequence[str], *, turns: int) -> dict[str, list[Turn]]:
    """Measure engines turn by turn."""
    engines = [ENGINES[name](workload, folder) for name in names]
    found: dict[str, list[Turn]] = {name: [] for name in names}
    try:
        for turn in range(turns + 1):
            for engine in engines:
                one = measure(engine, workload, step=turn + 1)
                engine.tidy()
                if turn:  # the first one pays for buffers and processes
                    found[engine.name].append(one)
    finally:
        for engine in engines:
            engine.close()
    return found


def measure(engine: Engine, workload: Workload, *, step: int, after: int = 3) -> Turn:
    """Save once while training; then ``after`` more steps to compare with."""
    workload.step()
    began = perf_counter()
    engine.save(step)
    blocked = called = perf_counter() - began
    seconds: list[float] = []
    while True:
        waited = _Watch(engine)
        seconds.append(workload.step(waited.join))
        blocked += waited.seconds
        if (at := engine.durable_at()) is not None:
            break
    # What a background thread still tidies up belongs to the save, so the first step after it is not yet a quiet one.
    seconds.append(workload.step())
    own = getattr(engine, "pending", None)
    quiet = statistics.median(workload.step() for _ in range(max(after, round(after * 0.3 / seconds[-1]))))
    return Turn(
        blocked_s=own.stall_s if own is not None else blocked,
        lost_s=called + sum(seconds) - quiet * len(seconds),
        durable_s=at - began,
        slower=statistics.mean(seconds[:-1]) / quiet,
    )


class _Watch:
    """Times the wait before the update."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.seconds = engine, 0.0

    def join(self) -> None:
        began = perf_counter()
        self._engine.join()
        self.seconds = perf_counter() - began


def _bars(case: str, found: dict[str, list[Turn]], workload: Workload) -> list[Bar]:
    medians = {
        name: {
            field.name: statistics.median(getattr(turn, field.name) for turn in turns)
            for field in dataclasses.fields(Turn)
        }
        for name, turns in found.items()
    }
    warm = Warm(workload)
    copy_s = statistics.median(warm.copy_s() for _ in range(7))
    detail: dict[str, Any] = {"memcpy_s": round(copy_s, 4), "mib": round(workload.size_bytes / 2**20)}
    for name, row in medians.items():
        lost = [turn.lost_s for turn in found[name]]
        detail[name] = {key: round(value, 4) for key, value in row.items()} | {
            "lost_range_s": [round(min(lost), 4), round(max(lost), 4)]
        }
    ours, bars = medians["torchrelay"], []
    if "dcp" in medians:
        value = max(0.0, ours["lost_s"]) / medians["dcp"]["lost_s"]
        bars.append(
            Bar(figure=f"{case}: lost time / dcp.async_save as documented", value=value, bar=0.10, detail=detail)
        )
    if best := [name for name in ("dcp-staging", "dcp-process") if name in medians]:
        least = min(medians[name]["lost_s"] for name in best)
        value = max(0.0, ours["lost_s"]) / least if least > 0 else float("inf")
        bars.append(Bar(figure=f"{case}: lost time / dcp.async_save in its best mode", value=value, bar=0.40))
    bars.append(Bar(figure=f"{case}: step while saving / step", value=ours["slower"], bar=1.1))
    return bars


if __name__ == "__main__":
    main()
