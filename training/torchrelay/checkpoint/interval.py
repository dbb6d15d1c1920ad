"""How many steps to train between two saves: a pure state machine on measured seconds.

It reads no clock, no store and no random generator: whoever measures tells it, and the same observations give the same decision. Saving too
often loses training time to saves, saving too seldom loses it to failures; the tuner holds the balance of what it has measured so far.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from torchrelay.errors import CorruptionError

__all__ = ["Decision", "IntervalTuner", "expected_goodput", "ladder_base_s", "optimal_interval_s"]

_HYSTERESIS = (
    1.2  # a target nearer than this factor changes nothing at once: the optimum is flat, and every change is told
)
_DRIFT, _PATIENCE = 1.05, 31  # one that stays further off than this, on one side for so many decisions, is no noise
_ENOUGH_SAVES = 3  # before, the given interval holds: the first save pays for buffers and processes
_RECENT_STEPS, _RECENT_SAVES, _RECENT_FAILURES = 64, 31, 9
_PRIOR_MTBF_S = 4 * 3600.0  # Llama 3 (2024), table 5: 419 unexpected interruptions in 54 days, one in 3.1 hours
_PRIOR_FAILURES = (
    0.5  # half a failure's worth of belief, as in Jeffreys' prior of a rate: the first real one outweighs it
)
_LADDER_INTERVALS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Save every ``interval_steps`` steps, about ``interval_s`` seconds of training (0.0 while no step is measured), and why.

    ``changed`` is true where the decision before was another one; only then is ``reason`` news.
    """

    interval_steps: int
    interval_s: float
    reason: str
    changed: bool


def optimal_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between saves that lose the least, for failures at a constant rate of 1 / ``mtbf_s``.

    The exact optimum, not Young's sqrt(2 * cost * mtbf): a life of the run yields on average ``1 / (exp((t + cost) / mtbf) - 1)`` commits of t
    seconds each (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006), which is largest where
    ``-log(1 - x) - x = cost / mtbf`` with x = t / mtbf. Restart, detection and commit latency scale that yield by factors that hold no t,
    so they cost goodput (``expected_goodput``) without moving the optimum. Raises ValueError for a negative cost or an mtbf that is not positive.
    """
    if cost_s < 0 or not mtbf_s > 0:
        raise ValueError(f"cost_s must be at least 0 and mtbf_s positive, not {cost_s} and {mtbf_s}")
    share = cost_s / mtbf_s
    if share < 1e-9:  # the difference below would cancel; Daly's expansion is exact to 1e-9 here
        return mtbf_s * (math.sqrt(2 * share) - 2 * share / 3)
    # Convex and increasing, and both starts lie right of the root: Newton's steps come down to it and never pass it.
    x = min(math.sqrt(2 * share), -math.expm1(-(1 + share)))
    for _ in range(64):
        if x >= 1.0:  # a save costs many times the mtbf: nothing but one save per life
            break
        down = (-math.log1p(-x) - x - share) * (1 - x) / x
        x -= down
        if down <= 1e-12 * x:
            break
    return mtbf_s * x


def expected_goodput(interval_s: float, *, cost_s: float, commit_s: float, down_s: float, mtbf_s: float) -> float:
    """Return training kept per wall time when failures come at a constant rate (0 to 1).

    A save counts ``commit_s`` after it was requested; ``down_s`` is detection and restart together. From the yield of ``optimal_interval_s``:
    a life survives the k-th commit with probability ``exp(-(k * (t + cost) - cost + commit) / mtbf)``.
    """
    late_s = max(0.0, commit_s - cost_s)
    cycles = (interval_s + cost_s) / mtbf_s
    if cycles > 700:
        return 0.0
    return interval_s * math.exp(-late_s / mtbf_s) / math.expm1(cycles) / (mtbf_s + down_s)


def ladder_base_s(interval_s: float) -> float:
    """Return where the retention ladder begins: at a few intervals, because what is younger is kept anyway."""
    return _LADDER_INTERVALS * interval_s


class IntervalTuner:
    """Chooses the save interval from what saves, commits and failures of this run have cost.

    The failure rate has a Gamma prior of ``prior_failures`` failures in ``prior_failures * prior_mtbf_s`` seconds; failures and exposure add up
    (conjugate: Gelman et al., "Bayesian Data Analysis", section 2.6), and its mean is used, because the loss is linear in the rate.
    Costs are medians of recent saves, so that one hiccup of the store moves nothing. The target is kept between the commit latency (a save
    cannot start before the last one is committed) and ``max_steps`` (the loss bound); the bound wins. Before three saves are measured,
    ``interval_steps`` holds. All times in seconds.

        tuner = IntervalTuner(interval_steps=50, max_steps=500)
        tuner.observe_step(0.2)
        tuner.observe_save(stall_s=0.01, slowdown_s=0.1, commit_s=2.0)
        tuner.observe_exposure(10.0)
        tuner.decide().interval_steps
    """

    def __init__(
        self,
        *,
        interval_steps: int,
        max_steps: int,
        min_steps: int = 1,
        prior_mtbf_s: float = _PRIOR_MTBF_S,
        prior_failures: float = _PRIOR_FAILURES,
    ) -> None:
        if not (1 <= min_steps <= max_steps and interval_steps >= 1):
            raise ValueError(f"need 1 <= min_steps <= max_steps and interval_steps >= 1: {min_steps}, {max_steps}")
        if not (prior_mtbf_s > 0 and prior_failures > 0):
            raise ValueError("prior_mtbf_s and prior_failures must be positive")
        self._min, self._max = min_steps, max_steps
        self._prior_failures, self._prior_exposure_s = prior_failures, prior_failures * prior_mtbf_s
        self._interval = min(max(interval_steps, min_steps), max_steps)
        self.failures, self.exposure_s = 0, 0.0
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._costs: deque[float] = deque(maxlen=_RECENT_SAVES)
        self._commits: deque[float] = deque(maxlen=_RECENT_SAVES)
        self._downs: deque[float] = deque(maxlen=_RECENT_FAILURES)
        self._drift = 0  # decisions in a row for which the target lay above (below: negative) the interval

    def observe_step(self, seconds: float) -> None:
        """Take in one step that ran without a save in flight."""
        if _usable(seconds) and seconds > 0:
            self._steps.append(seconds)

    def observe_save(self, *, stall_s: float, slowdown_s: float, commit_s: float) -> None:
        """Take in one committed save: training stopped ``stall_s``, ran ``slowdown_s`` longer, and it counted after ``commit_s``.

        A slowdown below 0 is noise of the step times and says as much as one above: it is kept until the median is taken.
        """
        if _usable(commit_s) and math.isfinite(stall_s + slowdown_s):
            self._costs.append(stall_s + slowdown_s)
            self._commits.append(commit_s)

    def observe_exposure(self, seconds: float) -> None:
        """Take in time in which the run trained and a failure could have come; neither restarts count nor the first ``grace_s`` after one."""
        if _usable(seconds):
            self.exposure_s += seconds

    def observe_failure(self, *, detect_s: float, restart_s: float) -> None:
        """Take in a failure, the seconds until it was noticed and those until training went on.

        Not one within ``grace_s`` of a start: it loses the same whatever the interval, and failures that come in bursts are mostly such.
        """
        self.failures += 1
        if _usable(detect_s) and _usable(restart_s):
            self._downs.append(detect_s + restart_s)

    @property
    def grace_s(self) -> float:
        """Training after a start that no interval can keep if a failure comes: the commit latency (0.0 while it is not measured)."""
        return median(self._commits) if self._commits else 0.0

    @property
    def mtbf_s(self) -> float:
        """Mean training time between failures: the inverse of the posterior mean of the rate."""
        return (self._prior_exposure_s + self.exposure_s) / (self._prior_failures + self.failures)

    def decide(self) -> Decision:
        """Return the interval to use from now on."""
        step_s = median(self._steps) if self._steps else 0.0
        if not self._steps or len(self._costs) < _ENOUGH_SAVES:
            reason = f"saves measured: {len(self._costs)} of {_ENOUGH_SAVES}; the given interval holds"
            return Decision(
                interval_steps=self._interval, interval_s=self._interval * step_s, reason=reason, changed=False
            )
        cost_s, commit_s = max(0.0, median(self._costs)), median(self._commits)
        best_s = optimal_interval_s(cost_s, self.mtbf_s)
        low = min(max(self._min, math.ceil(min(commit_s / step_s, self._max))), self._max)
        target = round(min(max(best_s / step_s, low), self._max))
        changed = target != self._interval and (self._is_off(target) or not low <= self._interval <= self._max)
        if changed:
            self._interval, self._drift = target, 0
        seconds = self._interval * step_s
        down_s = median(self._downs) if self._downs else 0.0
        goodput = expected_goodput(seconds, cost_s=cost_s, commit_s=commit_s, down_s=down_s, mtbf_s=self.mtbf_s)
        limit = (
            "the commit latency" if best_s < low * step_s else "the loss bound" if best_s > self._max * step_s else ""
        )
        reason = (
            f"a save costs {cost_s:.3g} s of training and is committed after {commit_s:.3g} s, a step takes {step_s:.3g} s, "
            f"a failure is expected every {self.mtbf_s:.3g} s ({self.failures} seen): best is {best_s:.3g} s between saves"
            f"{f', held by {limit}' if limit else ''}; expected goodput {goodput:.4f}"
        )
        return Decision(interval_steps=self._interval, interval_s=seconds, reason=reason, changed=changed)

    def _is_off(self, target: int) -> bool:
        """Whether the interval is far from its target, or has been off it on the same side for long."""
        ratio = target / self._interval
        side = (ratio > _DRIFT) - (ratio < 1 / _DRIFT)
        self._drift = self._drift + side if side and side * self._drift >= 0 else side
        return not 1 / _HYSTERESIS <= ratio <= _HYSTERESIS or abs(self._drift) >= _PATIENCE

    def state_dict(self) -> dict[str, Any]:
        """Return what was observed and decided as plain JSON values; bounds and prior are configuration and not in it."""
        return {
            "interval_steps": self._interval,
            "drift": self._drift,
            "failures": self.failures,
            "exposure_s": self.exposure_s,
            "steps_s": list(self._steps),
            "costs_s": list(self._costs),
            "commits_s": list(self._commits),
            "downs_s": list(self._downs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; the interval is kept within the bounds of this tuner. Raises CorruptionError, changing nothing."""
        try:
            interval, failures, exposure_s = int(state["interval_steps"]), int(state["failures"]), state["exposure_s"]
            drift = int(state["drift"])
            steps, costs, commits, downs = (
                _numbers(state[name]) for name in ("steps_s", "costs_s", "commits_s", "downs_s")
            )
            if failures < 0 or len(costs) != len(commits) or not _usable(exposure_s) or 0.0 in steps:
                raise ValueError("values out of range")
            if min([0.0, *steps, *commits, *downs]) < 0:
                raise ValueError("negative seconds")
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"not a state of the interval tuner: {error}") from None
        self._interval, self._drift = min(max(interval, self._min), self._max), drift
        self.failures, self.exposure_s = failures, float(exposure_s)
        self._steps = deque(steps, _RECENT_STEPS)
        self._costs, self._commits = deque(costs, _RECENT_SAVES), deque(commits, _RECENT_SAVES)
        self._downs = deque(downs, _RECENT_FAILURES)


def _usable(seconds: float) -> bool:
    """Whether this is a duration: a clock that jumped must not poison the medians."""
    return math.isfinite(seconds) and seconds >= 0


def _numbers(values: Iterable[object]) -> list[float]:
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("not finite")
    return numbers
