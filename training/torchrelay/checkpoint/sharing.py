"""Reading what all ranks of a host need only once per host.

The first rank that claims a range fetches it and leaves the bytes in a folder of the host; the others take them from there and check their hashes
as if they came from the store. Nobody depends on anybody: if whoever claimed a range is gone, or is slow, or left something wrong, a rank
fetches it itself. The folder is removed by the last rank that is done, or by the next restore of the run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import xxhash

from torchrelay.checkpoint.regions import Fetch, place_fetch, read_fetch
from torchrelay.store.base import ObjectStore

__all__ = ["HostShare"]

_PATIENCE_S = 60.0  # without a sign of the range that is waited for
_POLL_S = (0.001, 0.05)


class HostShare:
    """One rank's view of what the ranks of its host fetch for each other: ``rank`` of ``ranks`` on this host, restoring for ``generation``.

    Raises OSError where the host has no folder for it; a restore does without then.
    """

    def __init__(self, run_id: str, generation: int, *, rank: int, ranks: int, folder: Path | None = None) -> None:
        base = folder or Path(tempfile.gettempdir()) / f"torchrelay-restore-{os.getuid()}"
        self.rank, self.ranks = rank, ranks
        self._folder = base / run_id / f"{generation:06d}"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for other in self._folder.parent.iterdir():
            if other.name < self._folder.name:
                shutil.rmtree(other, ignore_errors=True)  # of a generation that fell while it restored

    def try_fetch(self, store: ObjectStore, fetch: Fetch) -> int | None:
        """Fetch a range unless another rank is at it; returns the bytes that came from the store, None to be taken later."""
        path = self._path(fetch)
        try:
            claim = os.open(path.with_suffix(".claim"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return None
        with os.fdopen(claim, "wb") as file:
            file.write(str(os.getpid()).encode())
        return self._fetch_for_all(store, fetch, path)

    def take(self, store: ObjectStore, fetch: Fetch) -> int:
        """Take a range that another rank has claimed, when it is there; else fetch it. Returns the bytes that came from the store."""
        path, wait_s = self._path(fetch), _POLL_S[0]
        deadline = time.monotonic() + _PATIENCE_S
        while not path.exists():
            if time.monotonic() > deadline or not _lives(path.with_suffix(".claim")):
                return read_fetch(store, fetch)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _POLL_S[1])
        data = memoryview(path.read_bytes())
        if len(data) == fetch.length and place_fetch(fetch, data, placed=False) is None:
            return 0
        return read_fetch(store, fetch)

    def done(self) -> None:
        """This rank needs nothing more; the last one removes what is left."""
        with contextlib.suppress(OSError):
            (self._folder / f"{self.rank}.done").touch()
            if len(list(self._folder.glob("*.done"))) >= self.ranks:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.parent.rmdir()

    def _fetch_for_all(self, store: ObjectStore, fetch: Fetch, path: Path) -> int:
        fetched = read_fetch(store, fetch)
        with contextlib.suppress(OSError):  # a full disk costs the others a GET, nothing more
            part = path.with_suffix(f".{self.rank}.part")
            with part.open("wb") as file:
                for view in fetch.in_place():
                    file.write(view)
            part.replace(path)
        return fetched

    def _path(self, fetch: Fetch) -> Path:
        name = f"{fetch.key}:{fetch.offset}:{fetch.length}"
        return self._folder / f"{xxhash.xxh3_128_hexdigest(name.encode())}.bytes"


def _lives(claim: Path) -> bool:
    """Whether the process that made a claim is still there; True also while it has not signed it yet."""
    try:
        pid = claim.read_text(encoding="ascii")
        if pid:
            os.kill(int(pid), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError):
        return True
    return True
