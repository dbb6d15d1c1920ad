"""Which bytes of the state each rank stores.

A rank holds a part (a box) of each tensor; ranks that hold the same part are its holders. A part with one holder is stored by it. What all ranks
hold (replicated state, as under DDP) is cut into chunks and divided over them by bytes. A part with some holders (HSDP) is stored by the
first, so that the loss of another replica does not cost the checkpoint. The plan is a pure function, so all ranks agree on it without a word.

In the staging area the slices lie as they will lie in packs: one after another, large elements first so that each is aligned, each pack at the
start of a page. So a pack is written, or sent, from where it was staged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrelay.checkpoint.chunks import chunk_spans
from torchrelay.checkpoint.layout import CHUNK_BYTES, DTYPES, PACK_BYTES
from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.checkpoint.pack import HEADER_BYTES, piece_cost

__all__ = ["Part", "ShardPlan", "Slice", "describe", "describe_plan", "plan_shard"]

_PAGE = 4096
_CORNER_BYTES = 160  # more than the name of a chunk adds to that of its tensor
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


@dataclass(frozen=True, slots=True)
class Slice:
    """One chunk this rank stores: bytes ``[start, start + length)`` of its part of a tensor, at ``offset`` of the staging area, in pack ``group``."""

    tensor: str
    start: int
    length: int
    offset: int
    group: int = 0


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
    tensors: Mapping[str, TensorMeta],
    parts: Sequence[Part],
    *,
    world_size: int,
    chunk_bytes: int = CHUNK_BYTES,
    pack_bytes: int = PACK_BYTES,
) -> ShardPlan:
    """Return what a rank that holds ``parts`` stores."""
    items = {part.tensor: DTYPES[tensors[part.tensor].dtype][1] for part in parts}
    total = sum(math.prod(part.extent) * items[part.tensor] for part in parts if _is_divided(part, world_size))
    divide = total >= _WORTH_DIVIDING
    stored: dict[Part, None] = {}
    slices: list[Slice] = []
    position, offset, group, cost = 0, 0, 0, HEADER_BYTES
    for part in sorted(parts, key=lambda part: -items[part.tensor]):
        shape = tensors[part.tensor].shape
        for start, length in chunk_spans(shape, part.corner, part.extent, items[part.tensor], chunk_bytes=chunk_bytes):
            mine = part.holder == 0
            if divide and _is_divided(part, world_size):
                mine = position * world_size // total == part.holder
                position += length
            if not mine:
                continue
            stored[part] = None
            more = piece_cost(part.tensor, length) + _CORNER_BYTES
            if cost + more > pack_bytes and cost > HEADER_BYTES:
                group, cost, offset = group + 1, HEADER_BYTES, -(-offset // _PAGE) * _PAGE
            slices.append(Slice(part.tensor, start, length, offset, group))
            offset, cost = offset + length, cost + more
    return ShardPlan(tuple(stored), tuple(slices), max(offset, _PAGE))


def describe(tensors: Mapping[str, TensorMeta]) -> dict[str, Any]:
    """Say in plain JSON what tensors there are."""
    return {name: [meta.dtype, meta.shape] for name, meta in tensors.items()}


def describe_plan(plan: ShardPlan, tensors: Mapping[str, TensorMeta]) -> dict[str, Any]:
    """Say in plain JSON, for the courier, where in the staging area the chunks of each box lie."""
    index = {part.tensor: number for number, part in enumerate(plan.parts)}
    return {
        "tensors": describe({part.tensor: tensors[part.tensor] for part in plan.parts}),
        "boxes": [[part.tensor, part.corner, part.extent] for part in plan.parts],
        "pieces": [
            [index[piece.tensor], piece.start, piece.offset, piece.length, piece.group] for piece in plan.slices
        ],
    }


def _is_divided(part: Part, world_size: int) -> bool:
    return part.holders == world_size
