"""Goodput of the save interval tuner, simulated beside other rules: ``python -m benchmarks.interval [--quick]``.

A trace is a list of lives: seconds of training until the next failure, drawn alike for every rule. In a life, ``steps`` steps and a save take turns;
a save costs ``cost_s`` of training and counts ``commit_s`` after it was requested, and the next one waits for that. A failure loses what no
committed save holds, then ``down_s`` pass. Goodput = kept training / wall time. The tuner sees only what a run measures, with noise and
hiccups, starts at 50 steps, and believes in ten times too many or too few failures. The best fixed interval is searched on the very traces.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.report import Bar, report
from torchrelay.checkpoint.interval import IntervalTuner

_FIXED = (10, 50, 200, 1000, 5000)
_MAX_STEPS = 100_000
_OVERHEAD = 0.035  # CheckFreq (FAST'21): save as often as costs at most 3.5 % of the training time
_PRIORS = {"prior / 10": 0.1, "prior right": 1.0, "prior x 10": 10.0}
_MTBF_H = (0.3, 1.0, 3.0, 8.0, 24.0)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds: of a step, of training lost per save, from request to commit, of detection and restart together.

    ``traces``: more where a failure loses more, so that where it happens to fall weighs more.
    """

    name: str
    step_s: float
    cost_s: float
    commit_s: float
    down_s: float
    traces: int = 1


COSTS = (
    Costs(name="light", step_s=0.2, cost_s=0.1, commit_s=5.0, down_s=10.0),
    Costs(name="middle", step_s=1.0, cost_s=2.0, commit_s=30.0, down_s=60.0, traces=2),
    Costs(name="heavy", step_s=5.0, cost_s=20.0, commit_s=120.0, down_s=300.0, traces=5),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Costs, mean life and distribution of one row of the table."""

    costs: Costs
    mtbf_h: float
    failures: str

    def trace(self, seed: int, hours: float) -> Floats:
        """Return the lives of a run of ``hours`` hours of training; the last one ends without a failure."""
        random = np.random.default_rng([seed, sorted(LIVES).index(self.failures), int(10 * self.mtbf_h)])
        mean_s, end_s = self.mtbf_h * 3600, hours * 3600
        lives = LIVES[self.failures](random, mean_s, 8 + int(3 * end_s / mean_s))
        ends = np.cumsum(lives)
        cut = int(np.searchsorted(ends, end_s))
        before = float(ends[cut - 1]) if cut else 0.0
        return np.append(lives[:cut], end_s - before)


def _weibull(random: np.random.Generator, mean_s: float, number: int, *, shape: float) -> Floats:
    draws = random.weibull(shape, max(number, 4000))
    return np.asarray(draws[:number] * (mean_s / _weibull_mean(shape)))


@functools.cache
def _weibull_mean(shape: float) -> float:
    return float(np.mean(np.random.default_rng(0).weibull(shape, 2_000_000)))


def _bursts(random: np.random.Generator, mean_s: float, number: int) -> Floats:
    """Every failure is followed by a second and a third within minutes with probability one half."""
    short = random.random(number) < 0.5
    long_s = random.exponential((mean_s - 0.5 * 0.02 * mean_s) / 0.5, number)
    return np.where(short, random.exponential(0.02 * mean_s, number), long_s)


LIVES: dict[str, Callable[[np.random.Generator, float, int], Floats]] = {
    "exponential": lambda random, mean_s, number: random.exponential(mean_s, number),
    "weibull 0.7": functools.partial(_weibull, shape=0.7),
    "weibull 1.5": functools.partial(_weibull, shape=1.5),
    "bursts": _bursts,
}


def goodput(kept_s: float, lives: Floats, costs: Costs) -> float:
    """Kept training over wall time, restarts included."""
    return kept_s / (float(lives.sum()) + (len(lives) - 1) * costs.down_s)


def fixed(lives: Floats, costs: Costs, steps: int) -> float:
    """Goodput of saving every ``steps`` steps."""
    # A save waits for the one before: steps until that one is committed, where the interval is shorter.
    steps = max(steps, int(np.ceil((costs.commit_s - costs.cost_s) / costs.step_s)))
    train_s = steps * costs.step_s
    cycle_s = train_s + costs.cost_s
    commits = np.floor((lives + costs.cost_s - costs.commit_s) / cycle_s).clip(0)
    kept = commits * train_s
    saved = np.floor(lives[-1] / cycle_s)
    kept[-1] = saved * train_s + min(lives[-1] - saved * cycle_s, train_s)  # the run's end loses nothing
    return goodput(float(kept.sum()), lives, costs)


def tuned(lives: Floats, costs: Costs, *, prior_mtbf_s: float, seed: int) -> float:
    """Goodput of the tuner, which measures what a run would."""
    random = np.random.default_rng(seed)
    tuner = IntervalTuner(interval_steps=50, max_steps=_MAX_STEPS, prior_mtbf_s=prior_mtbf_s)
    kept_s = 0.0
    for number, life_s in enumerate(lives):
        kept_s += _life(tuner, float(life_s), costs, random, last=number == len(lives) - 1)
        if number < len(lives) - 1 and life_s > tuner.grace_s:
            tuner.observe_failure(detect_s=0.2 * costs.down_s, restart_s=0.8 * costs.down_s)
    return goodput(kept_s, lives, costs)


def _life(tuner: IntervalTuner, life_s: float, costs: Costs, random: np.random.Generator, *, last: bool) -> float:
    """Train for ``life_s``; return the seconds of training that were kept."""
    now_s, trained_s, requested = 0.0, 0.0, 0.0
    pending: list[tuple[float, float]] = []  # (when it counts, what it holds)
    while True:
        steps = max(tuner.decide().interval_steps, int(np.ceil((costs.commit_s - costs.cost_s) / costs.step_s)))
        end_s = now_s + steps * costs.step_s
        if end_s > life_s:
            break
        trained_s += steps * costs.step_s
        pending.append((end_s + costs.commit_s, trained_s))
        tuner.observe_exposure(_beyond(tuner.grace_s, requested, end_s))
        requested = end_s
        _measure(tuner, costs, random)
        now_s = end_s + costs.cost_s
    tuner.observe_exposure(_beyond(tuner.grace_s, requested, life_s))
    if last:
        return trained_s + max(0.0, life_s - now_s)
    return max([0.0, *(held_s for counts_s, held_s in pending if counts_s <= life_s)])


def _beyond(grace_s: float, since_s: float, until_s: float) -> float:
    return max(0.0, until_s - max(since_s, grace_s))


def _measure(tuner: IntervalTuner, costs: Costs, random: np.random.Generator) -> None:
    """Steps vary by 5 %, costs and commits by 30 %, and one save in twenty meets a slow store."""
    noise = random.normal(size=3)
    tuner.observe_step(costs.step_s * float(np.exp(0.05 * noise[0])))
    hiccup = 10.0 if random.random() < 0.05 else 1.0
    cost_s = costs.cost_s * hiccup * float(np.exp(0.3 * noise[1]))
    tuner.observe_save(
        stall_s=0.2 * cost_s, slowdown_s=0.8 * cost_s, commit_s=costs.commit_s * hiccup * float(np.exp(0.3 * noise[2]))
    )


def grid(costs: Costs, points: int) -> list[int]:
    """Fixed intervals to search, in steps, evenly spaced in their logarithm."""
    return sorted({round(value) for value in np.geomspace(1, _MAX_STEPS, points)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One cell: goodput of every rule, mean of its traces, and of the one fixed interval that was best on them.

    ``single`` is the tuner's worst share of the best interval of one trace alone, which owes much to where failures happened to fall.
    """

    cell: Cell
    best: float
    best_steps: int
    single: float
    rules: dict[str, float]

    @property
    def worst(self) -> float:
        """The tuner's goodput with the worst prior, as a share of the best fixed interval's."""
        return min(self.rules[name] for name in _PRIORS) / self.best


def simulate(cell: Cell, *, hours: float, points: int) -> Row:
    """Run every rule on the same traces."""
    costs, mtbf_s = cell.costs, cell.mtbf_h * 3600
    lives = [cell.trace(seed, max(hours, 30 * cell.mtbf_h)) for seed in range(costs.traces)]
    tried = grid(costs, points)
    table = np.array([[fixed(one, costs, steps) for one in lives] for steps in tried])
    means = table.mean(axis=1)
    found = np.array(
        [
            [tuned(one, costs, prior_mtbf_s=mtbf_s * wrong, seed=seed) for seed, one in enumerate(lives)]
            for wrong in _PRIORS.values()
        ]
    )
    others = {
        "checkfreq": max(1, int(np.ceil(costs.cost_s / _OVERHEAD / costs.step_s))),
        "continuous": 1,
        **{f"every {steps}": steps for steps in _FIXED},
    }
    return Row(
        cell=cell,
        best=float(means.max()),
        best_steps=tried[int(means.argmax())],
        single=float((found / table.max(axis=0)).min()),
        rules=dict(zip(_PRIORS, found.mean(axis=1).tolist(), strict=True))
        | {name: float(np.mean([fixed(one, costs, steps) for one in lives])) for name, steps in others.items()},
    )


def cells(*, quick: bool) -> Iterator[Cell]:
    """Every cell of the table; ``quick``: two mean lives and one set of costs."""
    for costs in COSTS[1:2] if quick else COSTS:
        for mtbf_h in (0.3, 8.0) if quick else _MTBF_H:
            for failures in LIVES:
                yield Cell(costs=costs, mtbf_h=mtbf_h, failures=failures)


def main() -> None:
    """Simulate, print the table and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one set of costs, two mean lives")
    parser.add_argument("--hours", type=float, default=120.0, help="training time of a run; at least 30 mean lives")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    points = 100 if args.quick else 300
    rows = []
    for cell in cells(quick=args.quick):
        rows.append(simulate(cell, hours=args.hours, points=points))
        _print(rows[-1])
    report("interval", _bars(rows), out=args.out)


def _print(row: Row) -> None:
    cell, rules = row.cell, "  ".join(f"{name} {value:.4f}" for name, value in row.rules.items())
    where = f"{cell.costs.name:6} {cell.mtbf_h:4g} h {cell.failures:11}"
    print(f"{where}  best {row.best:.4f} (every {row.best_steps})  tuner/best {row.worst:.4f}  {rules}", flush=True)


def _bars(rows: list[Row]) -> list[Bar]:
    worst = min(rows, key=lambda row: row.worst)
    others = {
        name: {"worst": min(row.rules[name] / row.best for row in rows), "mean": _mean(rows, name)}
        for name in rows[0].rules
    }
    return [
        Bar(
            figure="interval: tuner's goodput / best fixed interval in hindsight, worst of all, prior wrong by 10",
            value=worst.worst,
            bar=0.99,
            at_least=True,
            detail={
                "cells": len(rows),
                "traces": sum(row.cell.costs.traces for row in rows),
                "worst cell": f"{worst.cell.costs.name}, {worst.cell.mtbf_h:g} h, {worst.cell.failures}",
                "mean": round(float(np.mean([row.worst for row in rows])), 5),
                "worst single trace": round(min(row.single for row in rows), 4),
                "others / best": {name: {key: round(part, 4) for key, part in v.items()} for name, v in others.items()},
            },
        )
    ]


def _mean(rows: list[Row], name: str) -> float:
    return float(np.mean([row.rules[name] / row.best for row in rows]))


if __name__ == "__main__":
    main()
