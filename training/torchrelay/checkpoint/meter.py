"""Measures a training loop for the interval tuner: step times with and without a save in flight. Reads no clock itself.

A save costs what the steps between its request and its commit took longer than the median of steps without one, the wait of the training
thread included; so whatever the background takes from training is charged, however it takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Protocol

from torchrelay.checkpoint.interval import Decision, IntervalTuner

__all__ = ["IntervalMeter", "Save"]

_RECENT = 64
_ENOUGH = 5  # steps without a save that make a baseline


class Save(Protocol):
    """A save on its way, as the meter sees it."""

    @property
    def step(self) -> int:
        """The step it holds."""

    @property
    def stall_s(self) -> float:
        """Seconds the training thread has waited for it so far."""

    @property
    def state(self) -> str:
        """``failed`` where it will never be committed."""


class IntervalMeter:
    """Feeds a tuner. ``stepped`` after each step, ``saved`` after each request of a save; both on the training thread of rank 0."""

    def __init__(self, tuner: IntervalTuner, *, now_s: float) -> None:
        self._tuner, self._started_s, self._last_s = tuner, now_s, now_s
        self._plain: deque[float] = deque(maxlen=_RECENT)
        self._save: Save | None = None
        self._requested_s = 0.0
        self._during: list[float] = []
        self._interval = tuner.decide().interval_steps

    @property
    def interval_steps(self) -> int:
        """The interval decided last."""
        return self._interval

    def saved(self, save: Save, now_s: float) -> None:
        """Note the request of a save. The call itself lies in the step that follows."""
        self._save, self._requested_s, self._during = save, now_s, []

    def stepped(self, now_s: float, *, committed: int) -> bool:
        """Note the end of a step; true where a save was committed and ``decide`` has something new to think about."""
        took_s, self._last_s = now_s - self._last_s, now_s
        if now_s - self._started_s > self._tuner.grace_s:
            self._tuner.observe_exposure(took_s)
        save = self._save
        if save is None:
            self._plain.append(took_s)
            self._tuner.observe_step(took_s)
            return False
        self._during.append(took_s)
        if save.state == "failed":
            self._save = None
        if committed < save.step:
            return False
        self._save = None
        if len(self._plain) < _ENOUGH:
            return False
        stall_s = save.stall_s
        extra_s = sum(self._during) - len(self._during) * median(self._plain)
        self._tuner.observe_save(stall_s=stall_s, slowdown_s=extra_s - stall_s, commit_s=now_s - self._requested_s)
        return True

    def decide(self) -> Decision:
        """Let the tuner decide, and keep to it."""
        decision = self._tuner.decide()
        self._interval = decision.interval_steps
        return decision

    def state_dict(self) -> Mapping[str, Any]:
        """The tuner's state."""
        return self._tuner.state_dict()
