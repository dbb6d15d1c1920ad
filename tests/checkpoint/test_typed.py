"""Typed JSON: what goes in comes out equal and of the same type; what cannot is refused when it is saved, by its path."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from torchrelay.checkpoint.sealed import seal, unseal
from torchrelay.checkpoint.typed import TensorRef, decode, encode
from torchrelay.errors import CorruptionError, UnserialisableError


class _Color(IntEnum):
    RED = 1


class _Text(str):
    pass


class _Record(UserDict[str, int]):
    pass


def _through(value: object) -> Any:
    """Take a value the way it takes in a checkpoint."""
    body = unseal("record", seal("record", {"value": encode(value)}), where="it")
    return decode(body["value"], TensorRef)


def _spelled(value: Any) -> Any:
    """Spell a value out, types and bits: ``==`` alone takes 1 for True, 0.0 for -0.0 and no NaN for another."""
    what: Any
    if isinstance(value, np.ndarray | np.generic):
        what = (value.dtype, value.shape, value.tobytes())
    elif isinstance(value, dict):
        what = [(_spelled(key), _spelled(item)) for key, item in value.items()]
        what.append(value.default_factory if isinstance(value, defaultdict) else None)
    elif isinstance(value, set | frozenset):
        what = sorted((_spelled(item) for item in value), key=repr)
    elif isinstance(value, list | tuple | deque):
        what = [_spelled(item) for item in value]
        what.append(value.maxlen if isinstance(value, deque) else None)
    else:
        what = repr(value)
    return type(value), what


_DTYPES = st.one_of(
    npst.scalar_dtypes(),
    npst.byte_string_dtypes(min_len=1, max_len=5),
    npst.unicode_string_dtypes(min_len=1, max_len=5),
    npst.datetime64_dtypes(),
    npst.timedelta64_dtypes(),
)
_ARRAYS = _DTYPES.flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
_KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from(["$tensor", "$dict", "$"]),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
_FACTORIES = st.sampled_from([None, dict, list, int, float, set])


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, dicts = st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)
    return st.one_of(
        lists,
        dicts,
        lists.map(tuple),
        dicts.map(OrderedDict),
        st.builds(lambda items, room: deque(items, len(items) + room if room else None), lists, st.integers(0, 2)),
        st.builds(defaultdict, _FACTORIES, dicts),
    )


_VALUES = st.recursive(
    st.one_of(
        _KEYS,
        st.sets(_KEYS, max_size=3),
        st.dictionaries(_KEYS, st.integers(), max_size=3).map(Counter),
        _ARRAYS,
        _ARRAYS.filter(lambda array: array.size > 0).map(lambda array: array.flat[0]),
        st.builds(TensorRef, st.text()),
    ),
    _containers,
    max_leaves=8,
)


@given(_VALUES)
def test_a_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    """Bit for bit, order of keys and empty arrays included."""
    assert _spelled(_through(value)) == _spelled(value)


@pytest.mark.parametrize(
    "value", [np.str_(""), np.bytes_(b""), np.zeros((2, 0), "V0"), np.asfortranarray([[1, 2], [3, 4]])]
)
def test_values_without_bytes_and_in_another_order_come_back(value: Any) -> None:
    """Nothing to store is not nothing; the order in memory is no part of a value."""
    assert _spelled(_through(value)) == _spelled(value)


def test_an_array_comes_back_writable() -> None:
    """A state that was loaded can be trained on: its arrays belong to it."""
    array = _through(np.arange(4))
    array += 1
    assert array.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), "builtins.object"),
        (len, "builtin_function_or_method"),
        (int, "builtins.type"),
        (bytearray(b"x"), "bytearray"),
        (range(3), "range"),
        (_Color.RED, "_Color"),
        (_Text("x"), "_Text"),
        (_Record(), "_Record"),
        (np.array([object()]), "array of Python objects"),
        (np.ma.masked_array([1], mask=[True]), "MaskedArray"),
        (np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), "element type"),
        (np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0], "element type"),
        (defaultdict(lambda: 7), "factory"),
        (10**5000, "digits"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda value: value, r"job"),
        (lambda value: {"a": [1, value]}, r"job\.a\[1\]"),
        (lambda value: {7: (value,)}, r"job\[7\]\[0\]"),
        (lambda value: OrderedDict(x=deque([0, {"y": value}])), r"job\['x'\]\.y"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_path(
    value: object, what: str, wrap: Callable[[object], object], path: str
) -> None:
    """Nothing is pickled, nothing is stored as something else: the message says where it is, what it is and what to do."""
    with pytest.raises(UnserialisableError, match=f"^{path} .*{what}") as caught:
        encode(wrap(value), "job")
    assert "state_dict()" in caught.value.hint


def test_a_key_that_cannot_be_stored_is_refused() -> None:
    """Keys are values too."""
    with pytest.raises(UnserialisableError, match=r"job\.<key> "):
        encode({_Color.RED: 1}, "job")


def test_an_unknown_tag_is_damage_wherever_it_is() -> None:
    """What this version cannot decode is not handed on as a dict that looks like a value."""
    for node in ({"$new": 1}, [{"a": {"$new": 1}}], {"$tuple": [{"$new": 1}]}, {"$": None}):
        with pytest.raises(CorruptionError, match="unknown type tag"):
            decode(json.loads(json.dumps(node)), TensorRef)
