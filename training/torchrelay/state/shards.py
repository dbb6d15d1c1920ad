"""Which bytes of the state each rank stores.

Replicated tensors are cut into chunks and divided over the ranks by bytes: every rank writes its share once, none writes it twice.
The plan is a pure function of the tensor table, so all ranks agree on it without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrelay.checkpoint.layout import CHUNK_BYTES
from torchrelay.checkpoint.manifest import TensorMeta

__all__ = ["ShardPlan", "Slice", "plan_shard"]

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Slice:
    """One chunk this rank stores: elements' bytes ``[start, start + length)`` of a tensor, at ``offset`` of the staging area."""

    tensor: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """All slices of one rank, and the size of the staging area they need."""

    slices: tuple[Slice, ...]
    area_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes that are stored."""
        return sum(part.length for part in self.slices)


def plan_shard(
    tensors: Mapping[str, TensorMeta], *, rank: int, world_size: int, chunk_bytes: int = CHUNK_BYTES
) -> ShardPlan:
    """Return what one rank stores of replicated tensors: the chunks that begin in its equal share of all bytes."""
    total = sum(meta.size_bytes for meta in tensors.values())
    slices, position, offset = [], 0, 0
    for name, meta in tensors.items():
        for start in range(0, meta.size_bytes, chunk_bytes):
            length = min(chunk_bytes, meta.size_bytes - start)
            if position * world_size // total == rank:
                slices.append(Slice(name, start, length, offset))
                offset += -(-length // _ALIGN) * _ALIGN
            position += length
    return ShardPlan(tuple(slices), max(offset, _ALIGN))
