"""A store in this process's memory: for tests and for trying things out. Gone with the process."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Sequence

from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.base import Capabilities, Created, Listing, ObjectInfo, Payload, check_key, views_of

__all__ = ["MemoryStore"]


class MemoryStore:
    """A dictionary behind a lock."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    @property
    def url(self) -> str:
        """``memory://name``; only this process can open it again."""
        return f"memory://{self._name}"

    def put(self, key: str, data: Payload) -> None:
        """Replace the object."""
        check_key(key)
        body = b"".join(views_of(data))
        with self._lock:
            self._objects[key] = (body, time.time())

    def create(self, key: str, data: bytes) -> Created:
        """Add the object unless there is one."""
        check_key(key)
        with self._lock:
            there, _ = self._objects.setdefault(key, (bytes(data), time.time()))
        return Created(ours=there == data, data=there)

    def get(
        self, key: str, *, offset: int = 0, length: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """Return a view of the object's bytes, or copy them into the given buffer."""
        with self._lock:
            if check_key(key) not in self._objects:
                raise NotFoundError(f"no object {key}")
            body = memoryview(self._objects[key][0])
        wanted = length if length is not None else (len(into) if into is not None else max(0, len(body) - offset))
        part = body[offset : offset + wanted]
        if len(part) != wanted:
            raise CorruptionError(f"{key} has {len(body)} bytes, wanted {wanted} from {offset}")
        if into is None:
            return part
        into[:wanted] = part
        return into[:wanted]

    def list(self, prefix: str, *, after: str = "", limit: int | None = None) -> Listing:
        """Return the matching rows in order."""
        with self._lock:
            rows = sorted(
                (key, len(body), body, when)
                for key, (body, when) in self._objects.items()
                if key.startswith(prefix) and key > after
            )
        infos = (
            ObjectInfo(key=k, size_bytes=n, etag=f"{zlib.crc32(body):08x}", modified_s=when)
            for k, n, body, when in rows[:limit]
        )
        return Listing(objects=tuple(infos), server_time_s=time.time())

    def delete(self, keys: Sequence[str]) -> None:
        """Forget the objects."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def probe(self) -> Capabilities:
        """A dictionary keeps its promises."""
        return Capabilities(create=True, checksum=False)
