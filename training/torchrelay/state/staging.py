"""The staging area: warm shared memory that a snapshot is copied into, and that the courier reads from.

It is anonymous memory passed by file descriptor: nothing to clean up, and it lives as long as the rank or the courier does. Its pages
are touched once when it is made, because the first touch costs several times the copy. Chunks of a tensor are copied as bytes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping

import numpy as np
import torch

from torchrelay.checkpoint.layout import DTYPES
from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.errors import CorruptionError
from torchrelay.state.shards import ShardPlan, Slice

__all__ = ["StagingArea"]


class StagingArea:
    """One rank's staging memory, laid out for one plan."""

    def __init__(self, plan: ShardPlan, tensors: Mapping[str, TensorMeta]) -> None:
        self.size_bytes = plan.area_bytes
        self.fd = _anonymous(plan.area_bytes)
        self._map = mmap.mmap(self.fd, plan.area_bytes)
        np.frombuffer(self._map, np.uint8)[:] = 0  # touch every page now, not during the first save
        self._targets = [(part, self._target(part, tensors[part.tensor].dtype)) for part in plan.slices]

    def copy(self, tensors: Mapping[str, torch.Tensor], names: frozenset[str]) -> None:
        """Copy the slices of the named tensors; a slice of a tensor on a device is fetched by this call."""
        flat: dict[str, torch.Tensor] = {}
        for part, target in self._targets:
            if part.tensor in names:
                source = flat.get(part.tensor)
                if source is None:
                    source = flat[part.tensor] = tensors[part.tensor].reshape(-1)
                first = part.start // source.element_size()
                target.copy_(source[first : first + target.numel()])

    def close(self) -> None:
        """Let go of the memory on this side; the courier's mapping stays."""
        self._targets.clear()
        os.close(self.fd)

    def _target(self, part: Slice, dtype: str) -> torch.Tensor:
        count = part.length // DTYPES[dtype][1]
        return torch.frombuffer(self._map, dtype=getattr(torch, dtype), count=count, offset=part.offset)


def versions(tensors: Mapping[str, torch.Tensor], names: frozenset[str]) -> dict[str, int]:
    """Return the version counter of each named tensor: it rises with every in-place change."""
    return {name: tensors[name]._version for name in names}


def check_unmoved(tensors: Mapping[str, torch.Tensor], before: Mapping[str, int], *, step: int) -> None:
    """Raise CorruptionError if a tensor was changed while it was being copied: the snapshot mixes two steps and must not be used."""
    moved = [name for name, version in before.items() if tensors[name]._version != version]
    if moved:
        raise CorruptionError(
            f"the snapshot of step {step} is torn: {len(moved)} tensors changed while they were copied (first: {moved[0]})",
            hint="change parameters and optimizer state only in optimizer.step(), or call PendingCheckpoint.wait_staged() before",
        )


def _anonymous(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("torchrelay-staging", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
