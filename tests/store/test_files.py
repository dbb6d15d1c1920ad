"""What a local folder may do to its store."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrelay.errors import NotFoundError, StorageFullError, StoreAccessError
from torchrelay.store.files import FileStore

_root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@_root_only
def test_a_full_disk_is_named_and_leaves_nothing_half_written(small_disk: Path) -> None:
    """The old object stays, the new one is not there in part, and space is given back."""
    store = FileStore(small_disk)
    store.put("k", b"old")
    with pytest.raises(StorageFullError, match="no space left"):
        store.put("k", bytes(2 * 2**20))
    with pytest.raises(StorageFullError):
        store.put("other", bytes(2 * 2**20))
    assert bytes(store.get("k")) == b"old"
    assert [item.key for item in store.list("").objects] == ["k"]
    store.put("fits", bytes(500_000))


def test_temporary_files_of_a_crash_are_not_objects(tmp_path: Path) -> None:
    """What a killed writer left behind is never listed or read."""
    store = FileStore(tmp_path)
    store.put("a/k", b"x")
    (tmp_path / "a" / ".tmp~0123456789abcdef").write_bytes(b"half")
    assert [item.key for item in store.list("").objects] == ["a/k"]
    assert [item.key for item in store.list("a/").objects] == ["a/k"]


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A clear error instead of a stack trace."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreAccessError, match="permissions"):
        FileStore(tmp_path / "file")
    store = FileStore(tmp_path / "store")
    store.put("k", b"x")
    with pytest.raises(NotFoundError):
        store.get("missing")
