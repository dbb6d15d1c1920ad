"""What follows an end: budgets, refills and stops, as tables; and what the store says about a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.checkpointing import RUN, SPEC, begin, new_run, save
from torchrelay.checkpoint.generation import Lease
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.config import FaultSpec, RunSpec, TrainSpec
from torchrelay.errors import RunMismatchError
from torchrelay.relay import (
    GenerationSummary,
    Outcome,
    Retry,
    SegmentPlan,
    Stop,
    judge,
    plan_segment,
    read_position,
    read_status,
)
from torchrelay.store.memory import MemoryStore

_SPEC = TrainSpec(run=RunSpec(run_id=RUN, total_steps=100), segment_steps=40, faults=FaultSpec(retry_delay_s=2.0))


def _outcome(kind: str, begin: int = 0, last: int = 0, committed: int | None = None, **more: Any) -> Outcome:
    body = {"kind": kind, "generation": 0, "begin_step": begin, "last_step": last, **more}
    return Outcome.from_dict({**body, "committed_step": begin if committed is None else committed})


def _follow(outcomes: Sequence[Outcome | None], *, spec: TrainSpec = _SPEC, origin: str = "me") -> list[Retry | Stop]:
    """Judge each outcome in turn, with those before it as the timeline; None is a generation that died without a word."""
    timeline: list[GenerationSummary] = []
    decisions: list[Retry | Stop] = []
    begin = 0
    for number, given in enumerate(outcomes, 1):
        outcome = replace(given, generation=number) if given is not None else None
        begin = outcome.begin_step if outcome is not None else begin
        row = GenerationSummary(
            number=number, begin_step=begin, host="h", origin="me", why="", started_s=0.0, outcome=outcome
        )
        timeline.append(row)
        if outcome is not None:
            decisions.append(judge(spec, timeline, outcome, origin=origin))
    return decisions


def test_faults_are_retried_with_growing_delays_until_the_budget_is_spent() -> None:
    """Three idle generations in a row are the last; the message has one line for each."""
    first, second, third = _follow([_outcome("killed", 10, 12), _outcome("oom", 10, 14), _outcome("killed", 10, 11)])
    assert (first, second) == (Retry(2.0), Retry(4.0))
    assert isinstance(third, Stop)
    assert third.kind == "no-progress"
    assert third.reason.count("generation ") >= 3
    assert "beyond step 10" in third.reason


def test_only_a_new_committed_step_refills_the_budget() -> None:
    """Any number of kills is fine as long as each generation commits something."""
    decisions = _follow([_outcome("killed", step, step + 12, committed=step + 10) for step in range(0, 200, 10)])
    assert set(decisions) == {Retry(2.0)}
    mixed = [
        _outcome("killed", 0, 5),
        _outcome("killed", 0, 25, committed=20),
        _outcome("killed", 20, 25),
        _outcome("killed", 20, 25),
        _outcome("killed", 20, 25),
    ]
    assert [type(decision) for decision in _follow(mixed)] == [Retry, Retry, Retry, Retry, Stop]


def test_generations_that_died_without_a_word_count_too() -> None:
    """The launcher and its flow were killed: nobody wrote an outcome, but there was no progress either."""
    (decision,) = _follow([None, None, _outcome("killed", 0, 3)])
    assert isinstance(decision, Stop)
    assert "died" in decision.reason


def test_the_same_fault_at_the_same_step_is_not_tried_a_third_time() -> None:
    """Same exception, same place in the data: deterministic. Elsewhere, or another one: not."""
    bug: dict[str, Any] = {"fingerprint": "ValueError:job.py:7", "message": "ValueError: bad batch"}
    same = _follow([_outcome("exception", 10, 14, **bug), _outcome("exception", 10, 14, **bug)])
    assert isinstance(same[-1], Stop)
    assert (same[-1].kind, same[-1].hint[:11]) == ("deterministic", "fix the job")
    assert "same step 15" in same[-1].reason
    for other in (_outcome("exception", 10, 13, **bug), _outcome("exception", 10, 14, fingerprint="KeyError:x.py:1")):
        assert _follow([_outcome("exception", 10, 14, **bug), other])[-1] == Retry(4.0)


def test_a_run_that_cannot_start_is_tried_once_more() -> None:
    """It never reached a first step, twice: the message of the program is the reason."""
    first, second = _follow([_outcome("startup"), _outcome("startup", message="no module named x", hint="install x")])
    assert first == Retry(2.0)
    assert isinstance(second, Stop)
    assert (second.kind, second.hint) == ("startup", "install x")
    assert "no module named x" in second.reason


@pytest.mark.parametrize("kind", ["config", "conflict"])
def test_what_a_retry_cannot_change_stops_at_once(kind: str) -> None:
    """With the hint of the error."""
    (decision,) = _follow([_outcome(kind, message="no such bucket", hint="make it")])
    assert decision == Stop("final", "no such bucket", "make it")


def test_being_told_to_stop_is_no_failure() -> None:
    """Preempted any number of times without progress: no delay, no budget, and faults around it count as if it were not there."""
    assert set(_follow([_outcome("preempted", 10, 10)] * 20)) == {Retry(0.0)}
    mixed = [_outcome("killed", 10, 12), _outcome("preempted", 10, 10), _outcome("killed", 10, 12)]
    assert _follow(mixed) == [Retry(2.0), Retry(0.0), Retry(4.0)]


def test_stepping_back_over_damage_is_no_idleness() -> None:
    """Each generation finds its checkpoint damaged and marks it; the next one begins earlier, until there is none."""
    decisions = _follow([_outcome("corruption", step, step, committed=step - 10) for step in range(60, 0, -10)])
    assert all(isinstance(decision, Retry) for decision in decisions)


def test_delays_are_bounded() -> None:
    """Doubling stops at a minute."""
    spec = replace(_SPEC, faults=FaultSpec(retry_delay_s=2.0, max_idle_generations=30))
    delays = [
        d.delay_s
        for d in _follow([_outcome("killed", 10, step) for step in range(10, 20)], spec=spec)
        if isinstance(d, Retry)
    ]
    assert delays == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0, 60.0]


def test_another_origin_starts_with_a_full_budget() -> None:
    """A person who starts the run again means it."""
    decisions = _follow([_outcome("killed", 10, 12)] * 3, origin="somebody else")
    assert decisions == [Retry(2.0)] * 3


@pytest.mark.parametrize(
    ("committed", "plan"),
    [
        (0, SegmentPlan(1, 0, 40)),
        (39, SegmentPlan(1, 39, 40)),
        (40, SegmentPlan(2, 40, 80)),
        (85, SegmentPlan(3, 85, 100)),
        (100, None),
        (140, None),
    ],
)
def test_segments_follow_from_the_committed_step_alone(committed: int, plan: SegmentPlan | None) -> None:
    """Whoever asks gets the same answer."""
    assert plan_segment(_SPEC, committed) == plan


def test_a_run_that_does_not_exist_has_no_steps() -> None:
    """Not an error: it is about to be started."""
    status = read_status(MemoryStore(), RUN)
    assert (status.exists, status.committed_step, status.finished, status.generations) == (False, 0, False, ())


def test_the_status_is_what_the_store_says() -> None:
    """Two generations, one with an outcome and one without; the newest committed step; finished at the last one."""
    store = MemoryStore()
    claim = new_run(store)
    save(store, ManifestRef(10, 1))
    Lease(store, claim, lease_s=1.0).end(_outcome("killed", 0, 15, committed=10, message="SIGKILL\nmore").to_dict())
    begin(store)
    status = read_status(store, RUN)
    assert (status.committed_step, status.total_steps, status.finished) == (10, SPEC.total_steps, False)
    first, second = status.generations
    assert "reached step 15, committed step 10: killed - SIGKILL" in first.line()
    assert "more" not in first.line()
    assert second.outcome is None
    assert "without a word" in second.line()
    save(store, ManifestRef(SPEC.total_steps, 2))
    assert read_status(store, RUN).finished


def test_a_position_is_refused_for_another_spec() -> None:
    """The run is compared before anything is planned."""
    store = MemoryStore()
    new_run(store)
    spec = TrainSpec(run=SPEC)
    position = read_position(store, spec)
    assert position.plan == SegmentPlan(1, 0, 200)
    with pytest.raises(RunMismatchError, match="global_batch"):
        read_position(store, replace(spec, run=replace(SPEC, global_batch=99)))


def test_outcomes_survive_the_way_through_json() -> None:
    """Unknown fields of a later version are ignored."""
    outcome = _outcome("oom", 3, 4, message="m", rank=1, stats={"a": 1.5})
    assert Outcome.from_dict({**outcome.to_dict(), "later": 1}) == outcome
