"""A store without space, on a real file system: loud, harmless, and over when there is space again."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.waiting import wait_until
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.reader import list_checkpoints, verify_checkpoint
from torchrelay.errors import RetryableError, StorageFullError
from torchrelay.state.capture import TrainingState
from torchrelay.state.checkpointer import Checkpointer
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

_MIB = 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("file systems may not be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def _model(value: float) -> nn.Linear:
    model = nn.Linear(1024, 512)  # 2 MiB
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def _set(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.copy_(torch.arange(model.weight.numel()).reshape(model.weight.shape) + value)


def _said(checkpointer: Checkpointer, words: str) -> bool:
    """Whether the courier's log says so."""
    return any(words in path.read_text() for path in checkpointer._session._folder.glob("courier-*.log"))


def _only_step_one_counts(store: ObjectStore) -> None:
    assert [row.ref for row in list_checkpoints(store, "r") if not row.damaged] == [ManifestRef(1, 1)]
    verify_checkpoint(store, "r", ManifestRef(1, 1))
    for item in store.list("runs/r/").objects:
        assert item.size_bytes, f"{item.key} is half written"


def test_a_full_disk_costs_a_wait_and_nothing_else(disk: Path) -> None:
    """The save goes on trying, loudly; the one before stays whole and the latest; training goes on; with space again the save is committed."""
    store = open_store(f"file://{disk}/store")
    ballast, model = disk / "ballast", _model(1.0)
    with Checkpointer(TrainingState(model=model), run="r", store=store.url) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1).result(60)
        ballast.write_bytes(bytes(7 * _MIB))
        _set(model, 2.0)
        pending = checkpointer.save(2)
        pending.wait_staged(30)
        _set(model, 3.0)  # training goes on: what was staged does not change any more
        wait_until(lambda: _said(checkpointer, "no space left"), timeout_s=40, what="a word about the space")
        assert (pending.state, checkpointer.busy, checkpointer.committed_step) == ("staged", True, 1)
        with pytest.raises(RetryableError, match="not committed"):
            pending.result(0.1)
        _only_step_one_counts(store)
        ballast.unlink()
        assert pending.result(60) == 2
    assert [ref.step for ref in read_history(store, "r").line] == [1, 2]
    verify_checkpoint(store, "r", ManifestRef(2, 1))
    again = _model(0.0)
    with Checkpointer(TrainingState(model=again), run="r", store=store.url) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 2
        assert torch.equal(again.weight.reshape(-1), torch.arange(again.weight.numel()) + 2.0)
        checkpointer.save(3).result(60)


def test_a_limit_on_the_size_of_files_is_a_short_write_and_not_a_torn_object(tmp_path: Path) -> None:
    """The courier's process may write only a part of a pack: nothing of it counts; when the limit is lifted the save is committed."""
    store = open_store(f"file://{tmp_path}/store")
    model = _model(1.0)
    with Checkpointer(TrainingState(model=model), run="r", store=store.url) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1).result(60)
        courier = checkpointer._session._courier
        assert courier is not None
        limits = resource.prlimit(courier.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(courier.pid, resource.RLIMIT_FSIZE, (_MIB, limits[1]))
        _set(model, 2.0)
        pending = checkpointer.save(2)
        wait_until(lambda: _said(checkpointer, "no space left"), timeout_s=40, what="a word about the space")
        assert courier.poll() is None
        assert not pending.written
        _only_step_one_counts(store)
        resource.prlimit(courier.pid, resource.RLIMIT_FSIZE, limits)
        assert pending.result(60) == 2
    verify_checkpoint(store, "r", ManifestRef(2, 1))
    assert not list((tmp_path / "store").rglob("*.tmp~*"))


def test_a_store_that_is_full_at_the_start_says_so(disk: Path) -> None:
    """Nothing can be written at all: the program hears of it at once, by name, and leaves nothing that counts."""
    with pytest.raises(OSError, match="No space left"):
        (disk / "ballast").write_bytes(bytes(9 * _MIB))
    with pytest.raises(StorageFullError, match="no space left"):
        Checkpointer(TrainingState(model=_model(1.0)), run="r", store=f"file://{disk}/store")
    assert read_history(open_store(f"file://{disk}/store"), "r").newest is None
