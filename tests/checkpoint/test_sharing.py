"""Ranks of one host read for each other."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpointing import RUN, expected, new_run, save
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.reader import load_manifest
from torchrelay.checkpoint.regions import Region, read_regions
from torchrelay.checkpoint.sharing import HostShare
from torchrelay.store.memory import MemoryStore

_REF = ManifestRef(3, 1)


def _restore(store: MemoryStore, folder: Path, *, rank: int, ranks: int) -> tuple[dict[str, bytes], int]:
    """Read everything as one of several ranks; returns the contents and the bytes that came from the store."""
    manifest = load_manifest(store, RUN, _REF)
    buffers = {name: bytearray(meta.size_bytes) for name, meta in manifest.tensors.items()}
    regions = [
        Region(name, (0,) * len(meta.shape), meta.shape, memoryview(buffers[name]), shared=True)
        for name, meta in manifest.tensors.items()
    ]
    share = HostShare(RUN, 2, rank=rank, ranks=ranks, folder=folder)
    fetched = read_regions(store, manifest, regions, sharing=share)
    share.done()
    return {name: bytes(buffer) for name, buffer in buffers.items()}, fetched


@pytest.fixture
def store() -> MemoryStore:
    """A store with one checkpoint."""
    made = MemoryStore()
    new_run(made)
    save(made, _REF)
    return made


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_byte_comes_from_the_store_once(store: MemoryStore, tmp_path: Path, ranks: int) -> None:
    """All ranks get everything, together they fetch it once, and nothing is left in the folder."""
    with ThreadPoolExecutor(ranks) as executor:
        found = list(executor.map(lambda rank: _restore(store, tmp_path, rank=rank, ranks=ranks), range(ranks)))
    assert all(contents == expected(_REF) for contents, _ in found)
    assert sum(fetched for _, fetched in found) == sum(map(len, expected(_REF).values()))
    assert not (tmp_path / RUN).exists()


def test_a_rank_does_without_one_that_died(store: MemoryStore, tmp_path: Path) -> None:
    """A claim of a process that is gone is not waited for."""
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join()
    _restore(store, tmp_path, rank=1, ranks=2)  # leaves its bytes, because rank 0 is not done
    for path in (tmp_path / RUN / "000002").iterdir():
        if path.suffix == ".claim":
            path.write_text(str(process.pid))
        else:
            path.unlink()
    contents, fetched = _restore(store, tmp_path, rank=0, ranks=2)
    assert contents == expected(_REF)
    assert fetched == sum(map(len, expected(_REF).values()))


def test_what_another_rank_left_is_checked(store: MemoryStore, tmp_path: Path) -> None:
    """Every bit of the shared bytes: a flipped one, or a short file, costs a GET and never a wrong value."""
    _restore(store, tmp_path, rank=1, ranks=2)
    shared = [path for path in (tmp_path / RUN / "000002").iterdir() if path.suffix == ".bytes"]
    assert shared
    for path in shared:
        good = path.read_bytes()
        for bad in [good[:-1], *(bytes([*good[:i], good[i] ^ 1 << (i % 8), *good[i + 1 :]]) for i in range(len(good)))]:
            path.write_bytes(bad)
            share = HostShare(RUN, 2, rank=0, ranks=2, folder=tmp_path)
            manifest = load_manifest(store, RUN, _REF)
            buffers = {name: bytearray(meta.size_bytes) for name, meta in manifest.tensors.items()}
            regions = [
                Region(name, (0,) * len(meta.shape), meta.shape, memoryview(buffers[name]), shared=True)
                for name, meta in manifest.tensors.items()
            ]
            assert read_regions(store, manifest, regions, sharing=share) > 0
            assert {name: bytes(buffer) for name, buffer in buffers.items()} == expected(_REF)
        path.write_bytes(good)


def test_what_a_fallen_generation_left_is_removed(tmp_path: Path) -> None:
    """The next restore of the run on this host clears the folder of an older one, and leaves other runs alone."""
    HostShare(RUN, 1, rank=0, ranks=2, folder=tmp_path)
    HostShare("other", 1, rank=0, ranks=2, folder=tmp_path)
    HostShare(RUN, 2, rank=0, ranks=2, folder=tmp_path)
    assert [path.name for path in (tmp_path / RUN).iterdir()] == ["000002"]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["000001"]
