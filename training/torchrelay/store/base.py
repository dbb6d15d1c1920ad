"""The object store as six verbs, each with its promise.

Everything above this seam (protocol, courier, command line) uses only these verbs, so that memory, a local folder and any
S3 server are interchangeable, and faults, retries and latency are wrappers of the same interface. There is no rename, copy,
append, multipart upload or compare-and-swap: the one atomic primitive relied on is ``create``.

Keys match ``[A-Za-z0-9._=/-]+``, have no empty, ``.`` or ``..`` component and no component over 100 bytes; no key is a folder of
another. Implementations are safe to use from many threads, and unusable after ``fork`` (open a new one in the child).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

__all__ = [
    "Buffer",
    "Capabilities",
    "Created",
    "Listing",
    "ObjectInfo",
    "ObjectStore",
    "Payload",
    "check_key",
    "views_of",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = Buffer | Sequence[Buffer]

_KEY = re.compile(r"[A-Za-z0-9._=-]{1,100}(/[A-Za-z0-9._=-]{1,100})*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """One row of a listing. ``modified_s`` is the server's own clock, Unix seconds."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Objects in ascending byte order of their keys, and the server's clock (Unix seconds) when it answered."""

    objects: tuple[ObjectInfo, ...]
    server_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Created:
    """Answer of ``create``: whether the object that exists now is ours, and the bytes that are there."""

    ours: bool
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """What a probe measured in this very bucket and prefix (never inferred from a product's name).

    ``create``: of two conditional PUTs of one key the second is refused. ``checksum``: a PUT whose CRC32C header is wrong
    is refused. Without ``create`` there is no fence between generations, and the run says so.
    """

    create: bool
    checksum: bool


class ObjectStore(Protocol):
    """Six verbs. Errors are those of :mod:`torchrelay.errors`: Retryable, StoreAccess, NotFound, Corruption."""

    @property
    def url(self) -> str:
        """Where this store is, without credentials; ``open_store(url)`` opens it again in another process."""

    def put(self, key: str, data: Payload) -> None:
        """Write the whole object. Atomic: readers see the old object, or the new one, or none; never a part.

        Only for immutable keys (same key, same bytes) or keys with one writer, so repeating it is harmless. Durable as far
        as the store promises when it returns. A sequence of buffers is written as their concatenation without copying.
        """

    def create(self, key: str, data: bytes) -> Created:
        """Write a small object unless the key exists; say whether the object there is ours.

        Of any number of racing callers exactly one is told ``ours`` (where ``probe().create``). ``data`` must contain a nonce:
        a reply that was lost is resolved by reading back and comparing bytes, so the answer is never ambiguous. If it cannot
        be read back, RetryableError is raised and repeating the call is safe.
        """

    def get(
        self, key: str, *, offset: int = 0, length: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """Read bytes ``[offset, offset + length)``, or to the end; into the given writable buffer if there is one.

        Returns a view of exactly the bytes read. With ``into`` and no ``length``, ``len(into)`` bytes are read. Raises NotFoundError when the key is
        missing and CorruptionError when the object is shorter than asked for: a short read is never returned.
        """

    def list(self, prefix: str, *, after: str = "", limit: int | None = None) -> Listing:
        """List objects whose key starts with ``prefix`` and is greater than ``after``, pages joined, at most ``limit``.

        Use ``limit`` only where no folders lie below the prefix: some servers go folder by folder ("a/x" before "a-b/x"), and stop on their way.

        Objects whose ``put`` or ``create`` returned before the call are included.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that do not exist are fine. Raises if any key could not be deleted."""

    def probe(self) -> Capabilities:
        """Measure, with objects under ``probe/`` that are deleted again, what the store really does."""


def check_key(key: str) -> str:
    """Return the key, or raise ValueError if it would not survive every store (see the module's rule)."""
    if not _KEY.fullmatch(key) or any(part in (".", "..") for part in key.split("/")):
        raise ValueError(f"not a portable object key: {key!r}")
    return key


def views_of(data: Payload) -> list[memoryview]:
    """Flatten a payload to byte views, without copying."""
    parts = [data] if isinstance(data, bytes | bytearray | memoryview) else data
    return [memoryview(part).cast("B") for part in parts]
