"""Typed JSON: the closed set of Python values that a training state may hold besides tensors.

Decoding gives back equal values of the same types; nothing is ever pickled, so reading a checkpoint runs no code. What has no
encoding is refused at save time with its path. Tensors are named here (``TensorRef``) and stored in packs.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchrelay.errors import CorruptionError, UnserialisableError

__all__ = ["TensorRef", "decode", "encode"]

_MAX_INT_BITS = 14_000  # Python's own limit on what it reads back from decimal digits is a little more
_HINT = "give it a state_dict() of numbers, strings, lists, dicts, arrays and tensors, or leave it out of the state"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for the tensor of this name in the checkpoint."""

    name: str


def encode(value: object, path: str = "state") -> Any:
    """Return plain JSON for a value. Raises UnserialisableError naming the path of the first value that has no encoding."""
    kind = type(value)
    if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise UnserialisableError(f"{path} holds an integer of over 4200 digits", hint=_HINT)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        number = float(value)  # type: ignore[arg-type]
        return number if math.isfinite(number) else {"$float": repr(number)}
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, path)
    if isinstance(value, np.generic) and value.dtype.hasobject is False:
        return {"$scalar": [_dtype(value, path), _b64(value.tobytes())]}
    raise UnserialisableError(
        f"{path} holds a {kind.__module__}.{kind.__qualname__}, which has no typed encoding", hint=_HINT
    )


def decode(node: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the value of a node; ``tensor(name)`` supplies tensors. Raises CorruptionError for an unknown tag."""
    if isinstance(node, list):
        return [decode(item, tensor) for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        ((tag, content),) = node.items()
        if tag.startswith("$"):
            decoder = _DECODERS.get(tag)
            if decoder is None:
                raise CorruptionError(f"unknown type tag {tag!r} in the state")
            return decoder(content, tensor)
    return {key: decode(item, tensor) for key, item in node.items()}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _items(value: Any, path: str) -> list[Any]:
    return [[encode(key, f"{path}.<key>"), encode(item, f"{path}[{key!r}]")] for key, item in value.items()]


def _dict(value: Any, path: str) -> Any:
    plain = all(type(key) is str for key in value) and not (len(value) == 1 and next(iter(value)).startswith("$"))
    if plain:
        return {key: encode(item, f"{path}.{key}") for key, item in value.items()}
    return {"$dict": _items(value, path)}


def _sequence(tag: str) -> Callable[[Any, str], Any]:
    return lambda value, path: {tag: [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]}


def _defaultdict(value: Any, path: str) -> Any:
    if value.default_factory not in _FACTORIES.values() and value.default_factory is not None:
        raise UnserialisableError(f"{path} is a defaultdict with a factory that has no name here", hint=_HINT)
    factory = next((name for name, known in _FACTORIES.items() if known is value.default_factory), None)
    return {"$defaultdict": [factory, _items(value, path)]}


def _array(value: Any, path: str) -> Any:
    if value.dtype.hasobject:
        raise UnserialisableError(f"{path} is an array of Python objects", hint=_HINT)
    return {"$array": [_dtype(value, path), list(value.shape), _b64(value.tobytes())]}


def _dtype(value: Any, path: str) -> str:
    """Name the element type, if its name is all of it: fields, and types that other packages add, would come back as raw bytes."""
    name = str(value.dtype.str)
    if np.dtype(name) != value.dtype:
        raise UnserialisableError(f"{path} has the element type {value.dtype}, which has no typed encoding", hint=_HINT)
    return name


def _from_bytes(dtype: str, data: str, shape: Any) -> Any:
    """Return a new array. An empty string or bytes scalar has elements without bytes, which ``frombuffer`` refuses."""
    kind = np.dtype(dtype)
    if not kind.itemsize:
        return np.zeros(shape, kind)
    return np.frombuffer(base64.b64decode(data), kind).reshape(shape).copy()


def _decode_items(content: Any, tensor: Callable[[str], Any]) -> list[tuple[Any, Any]]:
    return [(decode(key, tensor), decode(item, tensor)) for key, item in content]


_FACTORIES: dict[str, Any] = {"dict": dict, "list": list, "int": int, "float": float, "set": set}

_ENCODERS: dict[type, Callable[[Any, str], Any]] = {
    dict: _dict,
    list: lambda value, path: [encode(item, f"{path}[{i}]") for i, item in enumerate(value)],
    tuple: _sequence("$tuple"),
    set: lambda value, path: {"$set": [encode(item, path) for item in sorted(value, key=repr)]},
    frozenset: lambda value, path: {"$frozenset": [encode(item, path) for item in sorted(value, key=repr)]},
    deque: lambda value, path: {"$deque": [value.maxlen, [encode(item, path) for item in value]]},
    bytes: lambda value, path: {"$bytes": _b64(value)},
    complex: lambda value, path: {"$complex": [encode(value.real), encode(value.imag)]},
    OrderedDict: lambda value, path: {"$ordered": _items(value, path)},
    Counter: lambda value, path: {"$counter": _items(value, path)},
    defaultdict: _defaultdict,
    np.ndarray: _array,
    TensorRef: lambda value, path: {"$tensor": value.name},
}

_DECODERS: dict[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    "$float": lambda content, tensor: float(content),
    "$dict": lambda content, tensor: dict(_decode_items(content, tensor)),
    "$ordered": lambda content, tensor: OrderedDict(_decode_items(content, tensor)),
    "$counter": lambda content, tensor: Counter(dict(_decode_items(content, tensor))),
    "$defaultdict": lambda content, tensor: defaultdict(_FACTORIES.get(content[0]), _decode_items(content[1], tensor)),
    "$tuple": lambda content, tensor: tuple(decode(item, tensor) for item in content),
    "$set": lambda content, tensor: {decode(item, tensor) for item in content},
    "$frozenset": lambda content, tensor: frozenset(decode(item, tensor) for item in content),
    "$deque": lambda content, tensor: deque((decode(item, tensor) for item in content[1]), maxlen=content[0]),
    "$bytes": lambda content, tensor: base64.b64decode(content),
    "$complex": lambda content, tensor: complex(decode(content[0], tensor), decode(content[1], tensor)),
    "$array": lambda content, tensor: _from_bytes(content[0], content[2], content[1]),
    "$scalar": lambda content, tensor: _from_bytes(content[0], content[1], ())[()],
    "$tensor": lambda content, tensor: tensor(content),
}
