"""A save on its way: staging, staged, written, committed, or failed."""

from __future__ import annotations

import threading

from torchrelay.errors import RetryableError

__all__ = ["PendingCheckpoint"]

_ORDER = ("staging", "staged", "written", "committed", "failed")


class PendingCheckpoint:
    """Returned at once by ``Checkpointer.save``; tells how far the checkpoint has come.

    ``written`` means that this rank's shard is in the store, ``committed`` that the manifest is: only then is it a checkpoint. The commit is
    observed on rank 0; on other ranks ``result`` returns when their own shard is written.
    """

    def __init__(self, step: int, *, leader: bool) -> None:
        self.step = step
        self.stall_s = 0.0
        """Seconds the training thread has waited for this save so far: the call, and the wait before the optimizer step."""
        self._goal = "committed" if leader else "written"
        self._changed = threading.Condition()
        self._state = "staging"
        self._error: Exception | None = None

    @property
    def state(self) -> str:
        """One of staging, staged, written, committed, failed."""
        return self._state

    @property
    def written(self) -> bool:
        """The staging memory is free again (or the save has failed for good)."""
        return self._state in ("written", "committed", "failed")

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Wait until the copy is complete, so that the state may be changed. Raises what made the copy fail."""
        self._wait("staged", timeout_s)

    def wait_written(self, timeout_s: float | None = None) -> None:
        """Wait until this rank's shard is in the store."""
        self._wait("written", timeout_s)

    def settle(self) -> None:
        """Wait until the staging memory is free: written, or failed. Never raises; ``result`` tells what happened."""
        with self._changed:
            self._changed.wait_for(lambda: self.written)

    def result(self, timeout_s: float | None = None) -> int:
        """Wait for the commit (on ranks other than 0: for the own shard to be written) and return the step.

        Raises what made the save fail, or RetryableError after ``timeout_s`` (the save goes on).
        """
        self._wait(self._goal, timeout_s)
        return self.step

    def advance(self, state: str, error: Exception | None = None) -> None:
        """Move forward; going back (a repeated report after a courier's restart) is ignored."""
        with self._changed:
            if _ORDER.index(state) > _ORDER.index(self._state):
                self._state, self._error = state, error
                self._changed.notify_all()

    def _wait(self, state: str, timeout_s: float | None) -> None:
        with self._changed:
            reached = self._changed.wait_for(lambda: _ORDER.index(self._state) >= _ORDER.index(state), timeout_s)
            if not reached:
                raise RetryableError(
                    f"the save of step {self.step} is not {state} after {timeout_s} s (it is {self._state})"
                )
            if self._error is not None:
                raise self._error
