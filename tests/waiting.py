"""Waiting for a condition with a deadline: the only way tests here wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["wait_until"]

_TICK = threading.Event()  # never set: waiting on it is a pause that does not hold the GIL


def wait_until(condition: Callable[[], object], *, timeout_s: float = 30.0, what: str = "the condition") -> None:
    """Return when ``condition()`` is true; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {timeout_s} s")
        _TICK.wait(0.02)
