"""Proof that the parts of a checkpoint cover every element of every tensor exactly once, at a cost of O(1) per rank for who commits.

Each rank sums, over the elements it wrote, a weight that is a power of one fixed number in the field of 2**127 - 1 elements. A box of any
number of dimensions has a closed form, so this costs O(own boxes). The sums of all ranks must add up to the sum over all tensors. Two
different covers give polynomials that differ, and a polynomial of degree below 2**50 vanishes at a given point with probability below 2**-77
(Schwartz 1980, Zippel 1979): an accident cannot hide, and nobody here has a reason to construct one. ``verify`` proves the cover box by box.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import xxhash

from torchrelay.checkpoint.layout import DTYPES
from torchrelay.checkpoint.manifest import Box, ShardRecord, TensorMeta
from torchrelay.errors import CorruptionError

__all__ = ["check_cover", "check_sums", "cover_sum"]

_PRIME = 2**127 - 1
_POINT = int.from_bytes(hashlib.sha256(b"torchrelay/cover/1").digest()[:15], "little")


def cover_sum(tensors: Mapping[str, TensorMeta], boxes: Iterable[Box]) -> int:
    """Return the sum of weights over all elements of these boxes' chunks, in [0, 2**127 - 1).

    Raises ValueError if a box lies outside its tensor, or if the chunks of one that is no range of the tensor's bytes do not fill it.
    """
    total = 0
    for box in boxes:
        meta = tensors[box.tensor]
        _check_place(box, meta.shape)
        item = DTYPES[meta.dtype][1]
        strides = _strides(meta.shape)
        base = sum(low * stride for low, stride in zip(box.corner, strides, strict=True))
        spans = _joined([(chunk.start, chunk.length) for chunk in box.chunks])
        if any(start % item or length % item for start, length in spans):
            raise ValueError(f"a chunk of {box.tensor} cuts an element")
        if is_range(box.extent, meta.shape):
            part = sum(
                _power(base + (start + length) // item) - _power(base + start // item) for start, length in spans
            )
        elif spans == [(0, math.prod(box.extent) * item)]:
            part = _power(base) * _volume(box.extent, strides)
        elif spans:
            raise ValueError(f"the chunks of {box.tensor} do not fill their box")
        else:
            part = 0
        total += _weight(box.tensor) * part
    return total % _PRIME


def check_sums(tensors: Mapping[str, TensorMeta], sums: Iterable[int]) -> bool:
    """Whether the ranks' sums add up to that of all elements of all tensors, each once."""
    whole = sum(_weight(name) * (_power(math.prod(meta.shape)) - 1) for name, meta in tensors.items())
    return (whole - sum(sums)) % _PRIME == 0


def is_range(extent: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box of this extent is one range of its tensor's bytes: whole in all dimensions after the first that it divides."""
    divided = next((axis for axis, size in enumerate(extent) if size != 1), len(shape))
    return tuple(extent[divided + 1 :]) == tuple(shape[divided + 1 :])


def check_cover(tensors: Mapping[str, TensorMeta], records: Iterable[ShardRecord]) -> None:
    """Prove box by box that every element of every tensor is stored exactly once. Raises CorruptionError naming the first tensor that is not."""
    parts: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]]] = {
        name: {} for name in tensors
    }
    for record in records:
        for box in record.boxes:
            if box.tensor not in parts:
                raise CorruptionError(f"{record.key} holds a tensor that is not in the table: {box.tensor}")
            spans = parts[box.tensor].setdefault((box.corner, box.extent), [])
            spans += [(chunk.start, chunk.length) for chunk in box.chunks]
    for name, meta in tensors.items():
        item = DTYPES[meta.dtype][1]
        for (_, extent), spans in parts[name].items():
            _check_spans(name, spans, math.prod(extent) * item)
        _check_boxes(name, list(parts[name]), meta.shape)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@lru_cache(maxsize=2**16)
def _power(exponent: int) -> int:
    return pow(_POINT, exponent, _PRIME)


@lru_cache(maxsize=2**16)
def _weight(name: str) -> int:
    return xxhash.xxh3_128_intdigest(name.encode()) % _PRIME


@lru_cache(maxsize=2**14)
def _volume(extent: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Sum of the point's powers over a box at the origin, times (point - 1) as in the sums over ranges: a product of geometric series."""
    product = _POINT - 1
    for size, stride in zip(extent, strides, strict=True):
        ratio = _power(stride)
        product = product * (pow(ratio, size, _PRIME) - 1) * pow(ratio - 1, -1, _PRIME) % _PRIME
    return product


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans that lie end to end; overlapping ones stay apart and count twice."""
    joined: list[tuple[int, int]] = []
    for start, length in sorted(spans):
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def _check_place(box: Box, shape: tuple[int, ...]) -> None:
    if len(box.corner) != len(shape) or len(box.extent) != len(shape):
        raise ValueError(f"a box of {box.tensor} has another number of dimensions than {shape}")
    if any(low + size > full for low, size, full in zip(box.corner, box.extent, shape, strict=True)):
        raise ValueError(f"a box of {box.tensor} lies outside {shape}")


def _check_spans(name: str, spans: list[tuple[int, int]], size_bytes: int) -> None:
    position = 0
    for start, length in sorted(spans):
        if start != position:
            raise CorruptionError(
                f"tensor {name}: byte {min(start, position)} is stored {'twice' if start < position else 'nowhere'}"
            )
        position = start + length
    if position != size_bytes:
        raise CorruptionError(f"tensor {name}: {position} of {size_bytes} bytes are stored")


def _check_boxes(name: str, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> None:
    for corner, extent in boxes:
        if len(corner) != len(shape) or len(extent) != len(shape):
            raise CorruptionError(f"tensor {name}: a part has another number of dimensions")
        if any(low < 0 or low + size > full for low, size, full in zip(corner, extent, shape, strict=True)):
            raise CorruptionError(f"tensor {name}: a part lies outside its shape {shape}")
    solid = sorted(box for box in boxes if math.prod(box[1]))
    if sum(math.prod(extent) for _, extent in solid) != math.prod(shape):
        raise CorruptionError(f"tensor {name}: its parts do not add up to its shape {shape}")
    # Sorted by corner, parts cut along the first dimension only can overlap only with their neighbours; anything else is compared in pairs.
    rows_only = all(extent[1:] == shape[1:] for _, extent in solid)
    pairs = pairwise(solid) if rows_only else ((a, b) for i, a in enumerate(solid) for b in solid[i + 1 :])
    for (corner_a, extent_a), (corner_b, extent_b) in pairs:
        if all(a < b + m and b < a + n for a, n, b, m in zip(corner_a, extent_a, corner_b, extent_b, strict=True)):
            raise CorruptionError(f"tensor {name}: two of its parts overlap")
