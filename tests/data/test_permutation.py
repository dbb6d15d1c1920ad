"""The keyed permutation: a bijection of any size, in constant memory."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.data.permutation import MAX_SIZE, KeyedPermutation


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 1000, 4095, 4097, 65_537])
def test_every_index_goes_to_a_place_of_its_own(size: int) -> None:
    """Exhaustively for small sizes, powers of two and their neighbours."""
    shuffle = KeyedPermutation(size, b"k")
    images = shuffle(np.arange(size))
    assert np.array_equal(np.sort(images), np.arange(size))
    assert np.array_equal(shuffle.inverse(images), np.arange(size))


@given(st.integers(1, MAX_SIZE), st.binary(max_size=40), st.lists(st.integers(0, MAX_SIZE), min_size=1, max_size=50))
def test_the_inverse_leads_back_at_any_size(size: int, key: bytes, raw: list[int]) -> None:
    """What has an inverse is a bijection: images lie in the range, and lead back."""
    indices = np.array([value % size for value in raw])
    shuffle = KeyedPermutation(size, key)
    images = shuffle(indices)
    assert images.min() >= 0
    assert images.max() < size
    assert np.array_equal(shuffle.inverse(images), indices)
    assert len(np.unique(images)) == len(np.unique(indices))


@given(st.integers(2, 10**12), st.binary(max_size=8), st.integers(0, 10**12))
def test_one_by_one_is_the_same_as_all_at_once(size: int, key: bytes, start: int) -> None:
    """The vectorised form is the scalar one, whatever the shape."""
    indices = (start + np.arange(12)) % size
    shuffle = KeyedPermutation(size, key)
    together = shuffle(indices.reshape(3, 4))
    assert together.shape == (3, 4)
    assert together.reshape(-1).tolist() == [int(shuffle(int(index))) for index in indices]


def test_a_trillion_samples_take_no_memory() -> None:
    """Making it and asking for a batch costs kilobytes, not the eight terabytes of a table."""
    tracemalloc.start()
    shuffle = KeyedPermutation(10**12, b"k")
    assert len(np.unique(shuffle(np.arange(10**12 - 4096, 10**12)))) == 4096
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_keys_give_different_orders_and_all_orders_of_four() -> None:
    """Every one of the 24 orders of four samples comes up, none much more often than another (a chi-squared test at 10^-6)."""
    seen = Counter(
        tuple(KeyedPermutation(4, number.to_bytes(4, "little"))(range(4)).tolist()) for number in range(4800)
    )
    assert set(seen) == set(itertools.permutations(range(4)))
    chi_squared = sum((count - 200) ** 2 / 200 for count in seen.values())
    assert chi_squared < 75  # 23 degrees of freedom


def test_neighbours_do_not_stay_neighbours() -> None:
    """In a shuffle of a million, hardly any two samples that followed each other still do."""
    images = KeyedPermutation(10**6, b"k")(np.arange(10**6))
    assert np.count_nonzero(np.abs(np.diff(images)) == 1) < 20  # 2 expected


@pytest.mark.parametrize(
    ("size", "key", "indices", "images"),
    [
        (11, b"k", list(range(11)), [4, 0, 3, 10, 5, 6, 9, 8, 2, 7, 1]),
        (10**12, b"epoch", [0, 1, 10**12 - 1], [32216781273, 52681577757, 489736433359]),
        (MAX_SIZE, b"", [0, MAX_SIZE - 1], [3074376013369214136, 1284758010713699851]),
    ],
)
def test_its_values_never_change(size: int, key: bytes, indices: list[int], images: list[int]) -> None:
    """They are the data order of every stored run: a run resumed by a later version must go on in it."""
    assert KeyedPermutation(size, key)(indices).tolist() == images


@given(st.integers(64, 10**12), st.lists(st.binary(max_size=40), min_size=2, max_size=6, unique=True))
def test_each_key_has_an_order_of_its_own(size: int, keys: list[bytes]) -> None:
    """Already in the first 64 places: two keys agree on them once in 2^296 or less often."""
    orders = [tuple(KeyedPermutation(size, key)(np.arange(64)).tolist()) for key in keys]
    assert len(set(orders)) == len(keys)


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1])
def test_impossible_sizes_are_refused(size: int) -> None:
    """With the limits."""
    with pytest.raises(ValueError, match=r"2\*\*62"):
        KeyedPermutation(size, b"")


def test_what_is_no_index_is_refused() -> None:
    """Outside, or not an integer; nothing at all is fine."""
    shuffle = KeyedPermutation(5, b"")
    for bad in ([5], [-1], [0.5]):
        with pytest.raises(ValueError, match="indices must"):
            shuffle(bad)
    assert shuffle([]).shape == (0,)
