"""Where the parts of tensors are cut into chunks, the units of hash, reference and read.

A chunk ends where another number of ranks would end its shard, so that a restore into any of the usual world sizes reads nothing it does not
need; small parts stay whole. The cuts are a pure function of shape and box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torchrelay.checkpoint.layout import CHUNK_BYTES

__all__ = ["chunk_spans"]

_WORLDS = (2, 3, 4, 8)
_LEAST_BYTES = 64 * 2**10  # a smaller chunk costs more to name than it saves to read


def chunk_spans(
    shape: Sequence[int],
    corner: Sequence[int],
    extent: Sequence[int],
    item_bytes: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[tuple[int, int]]:
    """Cut a box of a tensor into (start, length) in bytes of the box, row-major, without gaps; none for an empty box.

    Rows (first dimension) are cut where ``torch.chunk`` cuts the tensor, and the box itself, into 2, 3, 4 or 8, unless a piece would be
    smaller than 64 KiB; longer pieces are cut again at multiples of ``chunk_bytes``, itself a multiple of every element size.
    """
    size = math.prod(extent) * item_bytes
    if not size:
        return []
    cuts = [0]
    if size >= 2 * _LEAST_BYTES and shape:
        row = size // extent[0]
        wanted = {place - corner[0] for place in _boundaries(shape[0])} | _boundaries(extent[0])
        for place in sorted(row * rows for rows in wanted):
            if place - cuts[-1] >= _LEAST_BYTES and size - place >= _LEAST_BYTES:
                cuts.append(place)
    cuts.append(size)
    return [
        (start, min(chunk_bytes, high - start))
        for low, high in pairwise(cuts)
        for start in range(low, high, chunk_bytes)
    ]


def _boundaries(rows: int) -> set[int]:
    """Row numbers at which ``torch.chunk`` ends its chunks, for each of the world sizes."""
    return {place for world in _WORLDS for place in range(-(-rows // world), rows, -(-rows // world)) if rows}
