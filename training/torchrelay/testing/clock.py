"""A clock that a test moves by hand."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """Stands still until ``sleep`` or ``advance`` moves it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        """Seconds."""
        return self.now_s

    def time(self) -> float:
        """Seconds."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Move on at once."""
        self.now_s += seconds

    def advance(self, seconds: float) -> None:
        """Move on."""
        self.now_s += seconds
