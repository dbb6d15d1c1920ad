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
_WORTH_BYTES = 512 * 2**10  # the chunks of less cost more to name than they save to read


def chunk_spans(
    shape: Sequence[int],
    corner: Sequence[int],
    extent: Sequence[int],
    item_bytes: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> list[tuple[int, int]]:
    """Cut a box of a tensor into (start, length) in bytes of the box, row-major, without gaps; none for an empty box.

    Rows (first dimension) are cut where ``torch.chunk`` cuts the tensor, and the box itself, into 2, 3, 4 or 8, if tensor or box have at least
    512 KiB; longer pieces are cut again at multiples of ``chunk_bytes``, itself a multiple of every element size.
    """
    size = math.prod(extent) * item_bytes
    if not size:
        return []
    rows: set[int] = set()
    if shape and math.prod(shape) * item_bytes >= _WORTH_BYTES:
        rows |= {row - corner[0] for row in _boundaries(shape[0])}
    if shape and size >= _WORTH_BYTES:
        rows |= _boundaries(extent[0])
    cuts = [0, *(size // extent[0] * row for row in sorted(rows) if 0 < row < extent[0]), size]
    return [
        (start, min(chunk_bytes, high - start))
        for low, high in pairwise(cuts)
        for start in range(low, high, chunk_bytes)
    ]


def _boundaries(rows: int) -> set[int]:
    """Row numbers at which ``torch.chunk`` ends its chunks, for each of the world sizes."""
    return {place for world in _WORLDS for place in range(-(-rows // world), rows, -(-rows // world)) if rows}
