"""The interval meter: what a save is charged, and what is not measured."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from torchrelay.checkpoint.interval import IntervalTuner
from torchrelay.checkpoint.meter import IntervalMeter


@dataclass
class Save:
    """A save on its way."""

    step: int
    stall_s: float = 0.25
    state: str = "staged"


class Loop:
    """Steps of one second that take two while a save is in flight."""

    def __init__(self) -> None:
        self.tuner = IntervalTuner(interval_steps=50, max_steps=1000)
        self.meter = IntervalMeter(self.tuner, now_s=100.0)
        self.now_s, self.step, self.committed = 100.0, 0, 0

    def run(self, steps: int, *, seconds: float = 1.0) -> bool:
        """Train; whether the last step brought news."""
        news = False
        for _ in range(steps):
            self.now_s, self.step = self.now_s + seconds, self.step + 1
            news = self.meter.stepped(self.now_s, committed=self.committed)
        return news

    def save(self, *, steps: int, state: str = "staged") -> bool:
        """Save, train ``steps`` slow steps, and commit with the last."""
        self.meter.saved(Save(step=self.step, state=state), self.now_s)
        saved = self.step
        self.run(steps - 1, seconds=2.0)
        self.committed = saved
        return self.run(1, seconds=2.0)


def test_a_save_is_charged_what_its_steps_took_longer() -> None:
    """Three steps of two seconds instead of one; committed after six seconds."""
    loop = Loop()
    loop.run(10)
    assert loop.save(steps=3)
    state = loop.tuner.state_dict()
    assert state["costs_s"] == pytest.approx([3.0])
    assert state["commits_s"] == pytest.approx([6.0])
    assert state["exposure_s"] == pytest.approx(16.0)


def test_steps_with_a_save_in_flight_are_no_baseline() -> None:
    """However many there are."""
    loop = Loop()
    loop.run(10)
    for _ in range(5):
        loop.save(steps=40)
    assert set(loop.tuner.state_dict()["steps_s"]) == {1.0}


def test_without_a_baseline_nothing_is_charged() -> None:
    """Fewer than five steps without a save."""
    loop = Loop()
    loop.run(4)
    assert not loop.save(steps=3)
    assert loop.tuner.state_dict()["costs_s"] == []


def test_a_failed_save_is_not_measured() -> None:
    """Its commit never comes, or comes with a later one."""
    loop = Loop()
    loop.run(10)
    loop.meter.saved(Save(step=loop.step, state="failed"), loop.now_s)
    assert not loop.run(5, seconds=2.0)
    assert loop.save(steps=3)
    assert len(loop.tuner.state_dict()["costs_s"]) == 1


def test_a_start_counts_as_exposure_only_after_the_commit_latency() -> None:
    """What was learnt before says how long that is."""
    loop = Loop()
    loop.run(10)
    loop.save(steps=3)
    tuner = IntervalTuner(interval_steps=50, max_steps=1000)
    tuner.load_state_dict(loop.tuner.state_dict())
    loop.tuner = tuner
    loop.meter = IntervalMeter(tuner, now_s=loop.now_s)
    loop.run(10)
    assert tuner.exposure_s == pytest.approx(16.0 + 4.0)
