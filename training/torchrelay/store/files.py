"""A store in a local folder: no server at all, durable when the call returns.

An object is a file written under a temporary name, synced, and renamed (``put``) or hard-linked (``create``) to its own; then its
folder is synced. So a reader never sees a part of an object, and of racing creators exactly one wins. Works on any POSIX file system with hard links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from torchrelay.errors import CorruptionError, NotFoundError, StorageFullError, StoreAccessError, StoreUnavailableError
from torchrelay.store.base import Capabilities, Created, Listing, ObjectInfo, Payload, check_key, views_of
from torchrelay.store.direct import write_all

__all__ = ["FileStore"]

_TEMPORARY = ".tmp~"  # '~' cannot occur in a key


class FileStore:
    """Objects as files below ``root``, which is created if it is missing."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        with self._errors(str(root)):
            self._root.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """``file:///folder``."""
        return f"file://{self._root}"

    def put(self, key: str, data: Payload) -> None:
        """Write aside, sync, rename over."""
        with self._errors(key), self._written(key, data) as (temporary, path):
            temporary.replace(path)

    def create(self, key: str, data: bytes) -> Created:
        """Write aside, sync, link; the link fails if the name is taken."""
        with self._errors(key), self._written(key, data) as (temporary, path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                there = path.read_bytes()
                return Created(ours=there == data, data=there)
        return Created(ours=True, data=data)

    def get(
        self, key: str, *, offset: int = 0, length: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """Read into the given buffer, or a new one."""
        with self._errors(key), (self._root / check_key(key)).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            wanted = length if length is not None else (len(into) if into is not None else max(0, size - offset))
            if offset + wanted > size:
                raise CorruptionError(f"{key} has {size} bytes, wanted {wanted} from {offset}")
            target = into[:wanted] if into is not None else memoryview(bytearray(wanted))
            done = 0
            while done < wanted:
                count = os.preadv(file.fileno(), [target[done:]], offset + done)
                if not count:
                    raise CorruptionError(f"{key} ended after {offset + done} bytes, wanted {wanted} from {offset}")
                done += count
        return target

    def list(self, prefix: str, *, after: str = "", limit: int | None = None) -> Listing:
        """Walk the folder that the prefix names; temporary files are not objects."""
        folder = self._root / prefix.rpartition("/")[0]
        with self._errors(prefix):
            rows = [row for row in self._walk(folder) if row.key.startswith(prefix) and row.key > after]
        rows.sort(key=lambda row: row.key)
        return Listing(objects=tuple(rows[:limit]), server_time_s=time.time())

    def delete(self, keys: Sequence[str]) -> None:
        """Unlink; empty folders stay."""
        for key in keys:
            with self._errors(key), contextlib.suppress(FileNotFoundError):
                (self._root / check_key(key)).unlink()

    def probe(self) -> Capabilities:
        """Create one key twice."""
        key = f"probe/{secrets.token_hex(8)}"
        try:
            first, second = self.create(key, b"first"), self.create(key, b"second")
        finally:
            self.delete([key])
        return Capabilities(create=first.ours and not second.ours, checksum=False)

    @contextlib.contextmanager
    def _written(self, key: str, data: Payload) -> Iterator[tuple[Path, Path]]:
        """Give a synced temporary file beside the key's place; sync the folder after the caller has linked or renamed it."""
        path = self._root / check_key(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            with temporary.open("wb", buffering=0) as file:
                write_all(file.fileno(), views_of(data))
                os.fsync(file.fileno())
            yield temporary, path
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            temporary.unlink(missing_ok=True)

    def _walk(self, folder: Path) -> Iterator[ObjectInfo]:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.name.startswith(_TEMPORARY):
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue  # deleted meanwhile
            if stat.S_ISDIR(status.st_mode):
                yield from self._walk(Path(entry.path))
            else:
                key = Path(entry.path).relative_to(self._root).as_posix()
                etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}"
                yield ObjectInfo(key=key, size_bytes=status.st_size, etag=etag, modified_s=status.st_mtime)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise NotFoundError(f"no object {what} in {self.url}") from None
        except OSError as error:
            self._raise(what, error)

    def _raise(self, what: str, error: OSError) -> NoReturn:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFullError(
                f"no space left for {what} in {self.url}", hint="free some space, or use another store"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise StoreAccessError(
                f"cannot use {what} in {self.url}: {error.strerror}", hint="check the folder and its permissions"
            ) from error
        raise StoreUnavailableError(f"{what} in {self.url}: {error.strerror or error}") from error
