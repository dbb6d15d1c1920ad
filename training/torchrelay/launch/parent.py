"""Dying with one's parent: a rank must not outlive its launcher, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected: int | None) -> None:
    """Ask the kernel to SIGKILL this process when its parent dies; end at once if the parent (``expected`` pid) is gone already.

    Called by the child itself, first thing, because code between fork and exec is not safe beside threads. Linux only; elsewhere the pulse file is
    the only watch.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the request took effect.
    if expected is not None and os.getppid() != expected:
        os._exit(1)
