"""A fresh meeting point for every generation: a port that nobody of an earlier one knows."""

from __future__ import annotations

import random
import socket

from torchrelay.errors import RetryableError

__all__ = ["free_port"]

_FIRST, _LAST = 15000, 32000  # below the range from which the kernel serves outgoing connections


def free_port(host: str = "127.0.0.1") -> int:
    """Find a port that can be bound now. Raises RetryableError if a hundred random ones are taken."""
    dice = random.SystemRandom()
    for _ in range(100):
        port = dice.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RetryableError("no free port for the rendezvous")
