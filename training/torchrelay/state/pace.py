"""Keeping a courier within its share of the network and of the processors. No torch."""

from __future__ import annotations

import threading
import time

__all__ = ["Pace"]


class Pace:
    """Holds back work so that, since ``begin``, bytes sent per second and processor seconds per second stay within their caps (0: no cap).

    Called by the threads that do the work, before each piece of it; so a cap holds on average over a few pieces, not within one.
    """

    def __init__(self, *, bytes_per_s: float = 0.0, cores: float = 0.0) -> None:
        self._bytes_per_s, self._cores = bytes_per_s, cores
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.begin()

    def begin(self) -> None:
        """Start counting anew, with caps in force: what was not used before is not saved up."""
        self._stopped.clear()
        with self._lock:
            self._since, self._cpu_since, self._sent = time.monotonic(), time.process_time(), 0

    def stop(self) -> None:
        """Hold nothing back any more."""
        self._stopped.set()

    def send(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` more may be sent."""
        if self._bytes_per_s:
            with self._lock:
                due = self._since + self._sent / self._bytes_per_s
                self._sent += size_bytes
            self._stopped.wait(max(0.0, due - time.monotonic()))
        self.work()

    def work(self) -> None:
        """Wait until processor time may be used."""
        while self._cores and not self._stopped.is_set():
            with self._lock:
                ahead = (time.process_time() - self._cpu_since) / self._cores - (time.monotonic() - self._since)
            if ahead <= 0:
                return
            self._stopped.wait(min(ahead, 0.25))
