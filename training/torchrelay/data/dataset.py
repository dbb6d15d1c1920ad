"""Datasets named by their content, so that a resumed run can prove it trains on the same samples.

A version is a name for people, a SHA-256 digest for the program, and the number of samples. The ways to compute one are
canonical: the same content gives the same digest on any machine and at any place. Does not import torch.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

__all__ = ["DatasetVersion", "MapDataset"]

_BLOCK_BYTES = 1 << 20
_Put = Callable[[bytes], object]


class MapDataset(Protocol):
    """A map-style dataset: samples 0 .. len - 1 by index. ``torch.utils.data.Dataset`` with a length, a list, an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class DatasetVersion:
    """What the data are: a ``name`` to show, a ``digest`` of the content (lower-case hexadecimal), the number of samples.

    Compute one with ``of_samples``, ``of_files`` or ``of_bytes``, or give a digest that you keep beside the data.

    Example:
        >>> DatasetVersion.of_bytes("letters", b"abc", num_samples=3).digest == DatasetVersion.of_bytes("x", b"abc", num_samples=3).digest
        True
    """

    name: str
    digest: str
    num_samples: int

    def __post_init__(self) -> None:
        if not (0 < len(self.name) <= 200):
            raise ValueError("the name of a dataset must have 1 to 200 characters")
        if not re.fullmatch(r"[0-9a-f]{32,128}", self.digest):
            raise ValueError(
                f"the digest of a dataset must be 32 to 128 lower-case hexadecimal digits, not {self.digest[:140]!r}"
            )
        if not 1 <= self.num_samples < 2**62:
            raise ValueError(f"a dataset must have at least one sample, and fewer than 2**62, not {self.num_samples}")

    @classmethod
    def of_samples(cls, name: str, dataset: MapDataset) -> Self:
        """Hash every sample of a dataset: tensors, arrays, numbers, text, bytes, and tuples, lists and dicts of them.

        Reads the whole dataset once, in order. Raises ValueError for a sample that cannot be hashed, and for a dataset that
        returns something else each time (random augmentation): hash its raw data with ``of_files`` or ``of_bytes`` then.
        """
        count = len(dataset)
        if count and _sample_digest(dataset, 0) != _sample_digest(dataset, 0):
            raise ValueError(
                f"sample 0 of {name} differs between two reads (random augmentation?): hash the raw data with of_files or of_bytes"
            )
        total = hashlib.sha256(b"torchrelay/samples/1\n")
        for index in range(count):
            total.update(_sample_digest(dataset, index))
        return cls(name, total.hexdigest(), count)

    @classmethod
    def of_files(
        cls, name: str, paths: Iterable[str | Path], *, root: str | Path | None = None, num_samples: int | None = None
    ) -> Self:
        """Hash files by their names relative to ``root`` and their bytes, whatever their order.

        Without a root the bare file names count. A symbolic link goes by its own name and the bytes it leads to.
        ``num_samples`` defaults to one sample per file. Raises ValueError if two files have one name or a file lies outside the
        root, OSError if one cannot be read.
        """
        named = _by_name([Path(path) for path in paths], Path(root) if root is not None else None)
        total = hashlib.sha256(b"torchrelay/files/1\n")
        for relative, path in sorted(named.items()):
            _put_sized(total.update, b"f", relative.encode("utf-8", "surrogateescape"))
            total.update(_file_digest(path))
        return cls(name, total.hexdigest(), len(named) if num_samples is None else num_samples)

    @classmethod
    def of_bytes(cls, name: str, data: bytes | bytearray | memoryview, *, num_samples: int) -> Self:
        """Hash bytes as they are, such as a corpus in memory or the buffer of an array (``memoryview(array)``)."""
        total = hashlib.sha256(b"torchrelay/bytes/1\n")
        total.update(data)
        return cls(name, total.hexdigest(), num_samples)


def _by_name(paths: list[Path], root: Path | None) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for path in paths:
        relative = _place_below(path, root) if root is not None else path.name
        if relative in named:
            raise ValueError(f"{named[relative]} and {path} have the same name {relative!r}; give their root")
        named[relative] = path
    return named


def _place_below(path: Path, root: Path) -> str:
    """Return the name of ``path`` relative to ``root``. Links are followed up to the folder: a file that is one keeps its own name.

    Debian's own Python has such files in its library: aliases of others, and links to /etc.
    """
    try:
        return (path.parent.resolve() / path.name).relative_to(root.resolve()).as_posix()
    except ValueError:
        raise ValueError(f"{path} does not lie in {root}") from None


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.digest()


def _sample_digest(dataset: MapDataset, index: int) -> bytes:
    digest = hashlib.sha256()
    _put_value(digest.update, dataset[index], f"sample {index}")
    return digest.digest()


def _put_value(put: _Put, value: Any, where: str) -> None:
    """Feed one value: a tag for its kind, its size, its content. Kinds never collide: 1, 1.0, True and "1" all differ."""
    torch = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is not None and isinstance(value, torch.Tensor):
        _put_tensor(put, value, where)
    elif isinstance(value, np.ndarray | np.generic):
        _put_array(put, value, where)
    elif isinstance(value, Mapping):
        _put_sized(put, b"d", str(len(value)).encode())
        for key in _in_order(value, where):
            _put_value(put, key, f"{where}: a key")
            _put_value(put, value[key], f"{where}[{key!r}]")
    elif isinstance(value, tuple | list):
        _put_sized(put, b"l" if isinstance(value, list) else b"t", str(len(value)).encode())
        for position, item in enumerate(value):
            _put_value(put, item, f"{where}[{position}]")
    else:
        _put_scalar(put, value, where)


def _in_order(keys: Iterable[Any], where: str) -> list[Any]:
    try:
        return sorted(keys, key=lambda key: (type(key).__name__, key))
    except TypeError as error:
        raise ValueError(f"{where} has keys without an order ({error}), and so no canonical digest") from error


def _put_scalar(put: _Put, value: Any, where: str) -> None:
    if value is None or isinstance(value, bool):
        _put_sized(put, b"c", repr(value).encode())
    elif isinstance(value, int):
        _put_sized(put, b"i", str(int(value)).encode())
    elif isinstance(value, float):
        _put_sized(put, b"r", struct.pack("<d", value))
    elif isinstance(value, complex):
        _put_sized(put, b"z", struct.pack("<dd", value.real, value.imag))
    elif isinstance(value, str):
        _put_sized(put, b"s", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        _put_sized(put, b"b", bytes(value))
    else:
        raise ValueError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which has no canonical digest: "
            "hash the raw data with of_files or of_bytes, or give a digest of your own"
        )


def _put_tensor(put: _Put, tensor: Any, where: str) -> None:
    torch = sys.modules["torch"]
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{where} is a {tensor.layout} tensor; only dense tensors have a canonical digest")
    _put_sized(put, b"T", f"{tensor.dtype} {list(tensor.shape)}".encode())
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    put(flat.view(torch.uint8).numpy() if flat.numel() else b"")


def _put_array(put: _Put, value: np.ndarray[Any, Any] | np.generic, where: str) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(f"{where} is a masked array, which has no canonical digest: give its data and its mask")
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise ValueError(f"{where} is an array of {array.dtype}; only plain numbers and text have a canonical digest")
    little = array.dtype.newbyteorder("<")
    _put_sized(put, b"A", f"{little.str} {list(array.shape)}".encode())
    put(np.ascontiguousarray(array, dtype=little).tobytes())


def _put_sized(put: _Put, tag: bytes, content: bytes) -> None:
    put(tag + len(content).to_bytes(8, "little"))
    put(content)
