"""The interval tuner: the optimum, its bounds, what it learns, and that it does not flutter."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.interval import Costs, fixed, grid
from torchrelay.checkpoint.interval import IntervalTuner, expected_goodput, ladder_base_s, optimal_interval_s
from torchrelay.errors import CorruptionError

COST = st.floats(1e-4, 1e3)
MTBF = st.floats(1.0, 1e7)


def tuner(
    *,
    cost_s: float = 1.0,
    commit_s: float = 1.0,
    step_s: float = 1.0,
    saves: int = 5,
    start: int = 50,
    max_steps: int = 10**6,
    exposure_s: float = 0.0,
    failures: int = 0,
) -> IntervalTuner:
    """A tuner that has seen this."""
    made = IntervalTuner(interval_steps=start, max_steps=max_steps)
    for _ in range(saves):
        made.observe_step(step_s)
        made.observe_save(stall_s=0.25 * cost_s, slowdown_s=0.75 * cost_s, commit_s=commit_s)
    made.observe_exposure(exposure_s)
    for _ in range(failures):
        made.observe_failure(detect_s=1.0, restart_s=2.0)
    return made


@given(COST, MTBF)
def test_the_optimum_solves_its_equation(cost_s: float, mtbf_s: float) -> None:
    """exp((t + cost) / mtbf) * (1 - t / mtbf) = 1, and t is below both Young's interval and the mtbf."""
    best_s = optimal_interval_s(cost_s, mtbf_s)
    x = best_s / mtbf_s
    assert 0 < best_s <= math.sqrt(2 * cost_s * mtbf_s) * (1 + 1e-9)
    if 1e-9 < cost_s / mtbf_s < 20:
        assert -math.log1p(-x) - x == pytest.approx(cost_s / mtbf_s, rel=1e-5)
    assert best_s <= mtbf_s


@given(COST, MTBF, st.floats(1.0, 10.0))
def test_dearer_saves_and_rarer_failures_never_shorten_it(cost_s: float, mtbf_s: float, factor: float) -> None:
    """Monotone in both."""
    best_s = optimal_interval_s(cost_s, mtbf_s)
    assert optimal_interval_s(cost_s * factor, mtbf_s) >= best_s * (1 - 1e-9)
    assert optimal_interval_s(cost_s, mtbf_s * factor) >= best_s * (1 - 1e-9)


@given(st.floats(0.01, 10.0), st.floats(100.0, 1e5), st.floats(0.0, 30.0), st.floats(0.0, 100.0), st.floats(0.3, 3.0))
def test_no_other_interval_is_expected_to_keep_more(
    cost_s: float, mtbf_s: float, commit_s: float, down_s: float, factor: float
) -> None:
    """Whatever commits and restarts take, they do not move the optimum."""
    best_s = optimal_interval_s(cost_s, mtbf_s)
    best, other = (
        expected_goodput(value, cost_s=cost_s, commit_s=commit_s, down_s=down_s, mtbf_s=mtbf_s)
        for value in (best_s, factor * best_s)
    )
    assert 0 < other <= best * (1 + 1e-9) < 1


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(-1.0, 1.0), (1.0, 0.0), (1.0, math.nan)])
def test_senseless_arguments_are_refused(cost_s: float, mtbf_s: float) -> None:
    """No interval is made up for them."""
    with pytest.raises(ValueError, match="mtbf_s positive"):
        optimal_interval_s(cost_s, mtbf_s)


@given(COST, st.floats(0.0, 1e4), st.floats(1e-3, 100.0), st.integers(1, 5000), st.integers(1, 5000))
def test_decisions_stay_within_the_bounds(
    cost_s: float, commit_s: float, step_s: float, max_steps: int, start: int
) -> None:
    """At least the commit latency and one step, at most the loss bound, which wins."""
    decision = tuner(cost_s=cost_s, commit_s=commit_s, step_s=step_s, max_steps=max_steps, start=start).decide()
    assert 1 <= decision.interval_steps <= max_steps
    assert decision.interval_steps >= min(max_steps, commit_s / step_s) or math.isclose(
        decision.interval_steps, commit_s / step_s
    )


@given(COST, st.floats(1.0, 10.0), st.integers(0, 50))
def test_decisions_are_monotone_in_cost_and_failures(cost_s: float, factor: float, failures: int) -> None:
    """Up to the hysteresis, which starts from the same interval."""
    cheap = tuner(cost_s=cost_s, exposure_s=36000.0, failures=failures).decide()
    dear = tuner(cost_s=cost_s * factor, exposure_s=36000.0, failures=failures).decide()
    assert dear.interval_steps >= cheap.interval_steps / 1.2
    frail = tuner(cost_s=cost_s, exposure_s=36000.0, failures=failures + 5).decide()
    assert frail.interval_steps <= cheap.interval_steps * 1.2


def test_the_given_interval_holds_until_three_saves_are_measured() -> None:
    """The first save pays for buffers and processes and decides nothing."""
    for saves in range(3):
        decision = tuner(cost_s=30.0, saves=saves, start=7).decide()
        assert (decision.interval_steps, decision.changed) == (7, False)
    assert tuner(cost_s=30.0, saves=3, start=7).decide().changed


@given(st.floats(0.0, 1e6), st.integers(0, 1000))
def test_the_posterior_is_the_conjugate_one(exposure_s: float, failures: int) -> None:
    """Gamma(0.5, 0.5 * prior) and Poisson counts: mean rate = (0.5 + failures) / (0.5 * prior + exposure)."""
    made = tuner(exposure_s=exposure_s / 2, failures=failures)
    made.observe_exposure(exposure_s / 2)
    assert 1 / made.mtbf_s == pytest.approx((0.5 + failures) / (0.5 * 4 * 3600 + exposure_s))


@given(st.floats(0.72, 1.39))
def test_small_news_change_nothing(factor: float) -> None:
    """Within 20 % of the interval (44 % of the cost) nothing is changed; and a second look never changes what the first decided."""
    made = tuner(cost_s=10.0, saves=31)
    first = made.decide()
    assert first.changed
    assert not made.decide().changed
    for _ in range(31):
        made.observe_save(stall_s=10.0 * factor, slowdown_s=0.0, commit_s=1.0)
    again = made.decide()
    assert (again.interval_steps, again.changed) == (first.interval_steps, False)


def test_great_news_change_it_at_once() -> None:
    """Four times the cost is twice the interval, as soon as most saves say so."""
    made = tuner(cost_s=1.0, saves=31)
    first = made.decide().interval_steps
    for _ in range(16):
        made.observe_save(stall_s=4.0, slowdown_s=0.0, commit_s=1.0)
    second = made.decide()
    assert second.changed
    assert second.interval_steps == pytest.approx(2 * first, rel=0.02)
    assert "failure is expected" in second.reason


def test_a_small_drift_is_followed_when_it_stays() -> None:
    """Off by 10 % for 31 decisions on one side is no noise; swinging from side to side is."""
    made = tuner(cost_s=1.0, saves=31)
    first = made.decide().interval_steps
    for number in range(80):
        for _ in range(31):
            made.observe_save(stall_s=0.8 if number % 2 else 1.25, slowdown_s=0.0, commit_s=1.0)
        assert not made.decide().changed
    for _ in range(31):
        made.observe_save(stall_s=1.25, slowdown_s=0.0, commit_s=1.0)
    changed = [made.decide().changed for _ in range(62)]
    assert changed.index(True) in (29, 30)
    assert sum(changed) == 1
    assert made.decide().interval_steps == pytest.approx(first * 1.25**0.5, rel=0.02)


def test_hiccups_and_broken_clocks_move_nothing() -> None:
    """Fifteen wild saves of 31, and values that are no durations."""
    made = tuner(cost_s=1.0, saves=16)
    interval = made.decide().interval_steps
    for _ in range(15):
        made.observe_save(stall_s=1e6, slowdown_s=0.0, commit_s=1e6)
    made.observe_save(stall_s=math.nan, slowdown_s=0.0, commit_s=1.0)
    made.observe_save(stall_s=0.0, slowdown_s=0.0, commit_s=-1.0)
    for bad in (math.inf, -1.0, math.nan, 0.0):
        made.observe_step(bad)
        made.observe_exposure(bad)
    assert made.decide().interval_steps == interval


@given(COST, st.floats(0.01, 100.0), st.integers(0, 20), st.integers(0, 9))
def test_a_restored_tuner_decides_the_same(cost_s: float, commit_s: float, saves: int, failures: int) -> None:
    """Its state is plain JSON, and nothing is missing in it."""
    made = tuner(cost_s=cost_s, commit_s=commit_s, saves=saves, exposure_s=500.0, failures=failures)
    made.decide()
    other = IntervalTuner(interval_steps=3, max_steps=10**6)
    other.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert other.state_dict() == made.state_dict()
    assert other.decide() == made.decide()


@pytest.mark.parametrize(
    "broken",
    [{"failures": -1}, {"steps_s": [0.0]}, {"costs_s": [1.0]}, {"exposure_s": math.nan}, {"downs_s": [-1.0]}],
)
def test_a_broken_state_is_refused_and_changes_nothing(broken: dict[str, object]) -> None:
    """A tuner that starts anew is better than one that believes nonsense."""
    made = tuner()
    before = made.state_dict()
    with pytest.raises(CorruptionError):
        made.load_state_dict({**before, **broken})
    with pytest.raises(CorruptionError):
        made.load_state_dict({"failures": 1})
    assert made.state_dict() == before


def test_the_ladder_begins_at_a_few_intervals() -> None:
    """So that its smallest class holds a checkpoint."""
    decision = tuner().decide()
    assert ladder_base_s(decision.interval_s) == 4 * decision.interval_s > 0


@pytest.mark.parametrize("mtbf_s", [1200.0, 20000.0])
def test_the_simulator_agrees_with_the_formula(mtbf_s: float) -> None:
    """Exponential failures, many of them: goodput as expected, and the best interval of a search near the optimum."""
    costs = Costs(name="test", step_s=1.0, cost_s=5.0, commit_s=20.0, down_s=50.0)
    lives = np.random.default_rng(1).exponential(mtbf_s, 20_000)
    for steps in (50, 200, 1000):
        expected = expected_goodput(float(steps), cost_s=5.0, commit_s=20.0, down_s=50.0, mtbf_s=mtbf_s)
        assert fixed(lives, costs, steps) == pytest.approx(expected, rel=0.01)
    best = max(fixed(lives, costs, steps) for steps in grid(costs, 300))
    assert fixed(lives, costs, round(optimal_interval_s(5.0, mtbf_s))) >= 0.999 * best
