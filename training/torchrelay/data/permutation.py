"""A keyed permutation of [0, size), computed per index: the shuffle of an epoch without a table.

It is a Feistel network over pairs (left, right) with as equal halves as the size allows, walked until it lands inside. The pairs
outnumber the size by little more than its square root, so walking is rare. It is a good shuffle, not a cipher; its values are part
of the data order of every stored run and must never change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["MAX_SIZE", "KeyedPermutation"]

_Words = NDArray[np.uint64]
_ROUNDS = (
    16  # with 12, orders of six or seven samples were still measurably uneven; sixteen cost 0.16 ms per 1024 indices
)
MAX_SIZE = 2**62  # halves stay below 2**32, so the products below fit 64 bits


class KeyedPermutation:
    """A bijection on [0, size) chosen by ``key``; constant memory, vectorised, any size up to ``MAX_SIZE``.

    Example:
        >>> shuffle = KeyedPermutation(5, b"epoch 0")
        >>> sorted(shuffle(range(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, key: bytes) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"size must be between 1 and 2**62, not {size}")
        self.size = size
        left = math.isqrt(size - 1) + 1
        left += left % 2  # were both halves odd, only even permutations could be reached
        self._left, self._right = np.uint64(left), np.uint64(-(-size // left))
        stream = b"".join(hashlib.sha256(key + bytes([number])).digest() for number in range(_ROUNDS // 4))
        self._keys = [np.uint64(word) for word in np.frombuffer(stream, "<u8")]

    def __call__(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return where each index goes: same shape, int64. Raises ValueError for an index outside [0, size)."""
        return self._walk(self._forth, indices)

    def inverse(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return the indices that go to ``values``: same shape, int64. Raises ValueError for a value outside [0, size)."""
        return self._walk(self._back, values)

    def _walk(self, move: Callable[[_Words], _Words], values: ArrayLike) -> NDArray[np.int64]:
        given = np.asarray(values)
        if given.size == 0:
            return np.empty(given.shape, np.int64)
        if given.dtype.kind not in "iu":
            raise ValueError(f"indices must be integers, not {given.dtype}")
        if given.min() < 0 or given.max() >= self.size:
            raise ValueError(f"indices must lie in [0, {self.size}), not {given.min()} .. {given.max()}")
        # Flat, never zero-dimensional: NumPy wraps arrays of unsigned numbers silently but warns about scalars.
        moved = move(given.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(moved >= self.size)
        while outside.size:
            again = move(moved[outside])
            moved[outside] = again
            outside = outside[again >= self.size]
        return moved.astype(np.int64).reshape(given.shape)

    def _forth(self, values: _Words) -> _Words:
        left = values // self._right
        right = values - left * self._right
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                total = left + _noise(right, key, self._left)
                left = np.minimum(
                    total, total - self._left
                )  # modulo: the unsigned difference is huge unless it is the answer
            else:
                total = right + _noise(left, key, self._right)
                right = np.minimum(total, total - self._right)
        return left * self._right + right

    def _back(self, values: _Words) -> _Words:
        left = values // self._right
        right = values - left * self._right
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2 == 0:
                rest = left - _noise(right, key, self._left)
                left = np.minimum(rest, rest + self._left)
            else:
                rest = right - _noise(left, key, self._right)
                right = np.minimum(rest, rest + self._right)
        return left * self._right + right


_SHIFT, _HALF = np.uint64(33), np.uint64(32)
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)  # MurmurHash3's 64-bit finaliser


def _noise(values: _Words, key: np.uint64, limit: np.uint64) -> _Words:
    """Hash each value with the round key to a number in [0, limit)."""
    mixed = values + key
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX_1
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX_2
    mixed >>= _HALF  # the upper half is mixed best; scaled to the limit by a product instead of a slow remainder
    mixed *= limit
    mixed >>= _HALF
    return mixed
