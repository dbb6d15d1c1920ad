"""Which bytes of the state each rank stores.

A rank holds a part (a box) of each tensor; ranks that hold the same part are its holders. A part with one holder is stored by it. What all ranks
hold (replicated state, as under DDP) is cut into chunks and divided over them by bytes. A part with some holders (HSDP) is stored by the
first, so that the loss of another replica does not cost the checkpoint. The plan is a pure function, so all ranks agree on it without a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrelay.checkpoint.chunks import chunk_spans
from torchrelay.checkpoint.layout import CHUNK_BYTES, DTYPES
from torchrelay.checkpoint.manifest import TensorMeta

__all__ = ["Part", "ShardPlan", "Slice", "describe", "describe_plan", "plan_shard"]

_ALIGN = 64
_WORTH_DIVIDING = (
    2**20
)  # less replicated state than this is stored by rank 0: a restore then asks one record for it, not all


@dataclass(frozen=True, slots=True)
class Part:
    """The box of a tensor that this rank holds, as the ``holder``-th of ``holders`` ranks that hold the same box."""

    tensor: str
    corner: tuple[int, ...]
    extent: tuple[int, ...]
    holder: int = 0
    holders: int = 1

    def size_bytes(self, dtype: str) -> int:
        """Bytes of the box."""
        return math.prod(self.extent) * DTYPES[dtype][1]


@dataclass(frozen=True, slots=True)
class Slice:
    """One chunk this rank stores: bytes ``[start, start + length)`` of its part of a tensor, at ``offset`` of the staging area."""

    tensor: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """All slices of one rank, the parts they lie in, and the size of the staging area they need."""

    parts: tuple[Part, ...]
    slices: tuple[Slice, ...]
    area_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes that are stored."""
        return sum(part.length for part in self.slices)


def plan_shard(
    tensors: Mapping[str, TensorMeta], parts: Sequence[Part], *, world_size: int, chunk_bytes: int = CHUNK_BYTES
) -> ShardPlan:
    """Return what a rank that holds ``parts`` stores."""
    total = sum(part.size_bytes(tensors[part.tensor].dtype) for part in parts if _is_divided(part, world_size))
    divide = total >= _WORTH_DIVIDING
    stored: list[Part] = []
    slices, position, offset = [], 0, 0
    for part in parts:
        meta = tensors[part.tensor]
        own = False
        for start, length in chunk_spans(
            meta.shape, part.corner, part.extent, DTYPES[meta.dtype][1], chunk_bytes=chunk_bytes
        ):
            mine = part.holder == 0
            if divide and _is_divided(part, world_size):
                mine = position * world_size // total == part.holder
                position += length
            if mine:
                own = True
                slices.append(Slice(part.tensor, start, length, offset))
                offset += -(-length // _ALIGN) * _ALIGN
        if own:
            stored.append(part)
    return ShardPlan(tuple(stored), tuple(slices), max(offset, _ALIGN))


def describe(tensors: Mapping[str, TensorMeta]) -> dict[str, Any]:
    """Say in plain JSON what tensors there are."""
    return {name: [meta.dtype, meta.shape] for name, meta in tensors.items()}


def describe_plan(plan: ShardPlan, tensors: Mapping[str, TensorMeta]) -> dict[str, Any]:
    """Say in plain JSON, for the courier, where in the staging area the chunks of each box lie."""
    index = {part.tensor: number for number, part in enumerate(plan.parts)}
    return {
        "tensors": describe({part.tensor: tensors[part.tensor] for part in plan.parts}),
        "boxes": [[part.tensor, part.corner, part.extent] for part in plan.parts],
        "pieces": [[index[piece.tensor], piece.start, piece.offset, piece.length] for piece in plan.slices],
    }


def _is_divided(part: Part, world_size: int) -> bool:
    return part.holders == world_size
