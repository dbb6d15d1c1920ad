"""Random number generators of a rank: Python, NumPy, torch on the CPU and on every device.

At the same world size each rank gets exactly its own streams back. When the world size has changed there is no stream to give
back; new ones are derived by rule from (seed, step, rank), so that the same change always gives the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "derive_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """Return the state of all generators of this process; CUDA generators only if CUDA was initialised."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Set all generators of this process to a captured state."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for index, device_state in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, index)


def derive_rng(seed: int, *, step: int, rank: int) -> None:
    """Seed all generators of this process from SHA-256 over (seed of the run, step, rank)."""
    digest = hashlib.sha256(f"torchrelay/rng/1\n{seed}\n{step}\n{rank}".encode()).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, np.uint32))
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # seeds every device too
