"""The commands that take care of the store: what they print, that they show before they do, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpointing import new_run, save
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef, packs_prefix
from torchrelay.store import open_store


def _call(store: str, *args: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torchrelay.cli", *args, "--store", store],
        env={name: value for name, value in os.environ.items() if not name.startswith("TORCHRELAY_")},
        cwd=store.removeprefix("file://"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def trained(tmp_path: Path) -> str:
    """A store with a run of five checkpoints."""
    url = f"file://{tmp_path / 'store'}"
    store = open_store(url)
    new_run(store)
    for step in (10, 20, 30, 40, 50):
        save(store, ManifestRef(step, 1))
    return url


def _steps(store: str) -> list[int]:
    return [ref.step for ref in read_history(open_store(store), "r").line]


def test_from_verify_to_sweep(trained: str) -> None:
    """Nothing is forgotten before it is verified, nothing is done before --execute, and every object is explained at the end."""
    policy = ("--newest", "2", "--ladder-hours", "0")
    assert "nothing to forget" in _call(trained, "forget", "r", *policy)
    assert "5 of 5 checkpoints are whole" in _call(trained, "verify", "r")
    assert _call(trained, "checkpoints", "r").count("verified") == 5
    _call(trained, "pin", "r", "--step", "20", "--why", "the best one")
    assert "verified, pinned" in _call(trained, "checkpoints", "r")
    assert "would forget 2 of 5 checkpoints; --execute does it" in _call(trained, "forget", "r", *policy)
    assert _steps(trained) == [10, 20, 30, 40, 50]
    assert "forgot 2 of 5" in _call(trained, "forget", "r", *policy, "--execute")
    assert _steps(trained) == [20, 40, 50]
    assert "forgotten" in _call(trained, "fsck", "r")
    assert "stay because they are younger than 24 h" in _call(trained, "sweep", "r")
    assert "--execute does it" in _call(trained, "sweep", "r", "--grace-hours", "0")
    assert "deleted" in _call(trained, "sweep", "r", "--grace-hours", "0", "--execute")
    assert "nothing to sweep" in _call(trained, "sweep", "r", "--grace-hours", "0")
    report = json.loads(_call(trained, "fsck", "r", "--json"))
    assert {item["status"] for item in report["objects"]} == {"live"}
    assert "3 of 3 checkpoints are whole" in _call(trained, "verify", "r")


def test_one_checkpoint_by_hand(trained: str) -> None:
    """By its step; the newest and a pinned one are refused with what to do."""
    assert "would forget the checkpoint of step 30" in _call(trained, "forget", "r", "--step", "30")
    assert "forgot the checkpoint of step 30" in _call(trained, "forget", "r", "--step", "30", "--execute")
    assert "is needed: the newest" in _call(trained, "forget", "r", "--step", "50", "--execute", code=78)
    _call(trained, "pin", "r", "--step", "20")
    assert "unpin r --step 20" in _call(trained, "forget", "r", "--step", "20", "--execute", code=78)
    _call(trained, "unpin", "r", "--step", "20")
    assert "pinned: none" in _call(trained, "unpin", "r", "--step", "20", code=66)
    _call(trained, "forget", "r", "--step", "20", "--execute")
    assert _steps(trained) == [10, 40, 50]
    assert "no checkpoint of step 20" in _call(trained, "pin", "r", "--step", "20", code=66)


def test_fsck_finds_what_is_missing_and_what_is_foreign(trained: str, tmp_path: Path) -> None:
    """Exit code 65 with the key; a foreign object is listed and never swept."""
    store = open_store(trained)
    (tmp_path / "store/runs/r/notes.txt").write_text("mine")
    assert "unknown: runs/r/notes.txt" in _call(trained, "fsck", "r")
    pack = store.list(packs_prefix("r", read_history(store, "r").line[2])).objects[0].key
    (tmp_path / "store" / pack).unlink()
    assert f"MISSING: {pack}" in _call(trained, "fsck", "r", code=65)
    assert pack not in _call(trained, "fsck", "r", "--list", code=65).split("MISSING")[0]
    _call(trained, "sweep", "r", "--grace-hours", "0", "--execute")
    assert (tmp_path / "store/runs/r/notes.txt").exists()
    assert "step 30: DAMAGED" in _call(trained, "verify", "r", code=65)


@pytest.mark.parametrize(
    "args",
    [("forget", "r", "--newest", "0"), ("forget", "r", "--ladder-hours", "-1"), ("sweep", "r", "--grace-hours", "nan")],
)
def test_what_makes_no_sense_is_refused(trained: str, args: tuple[str, ...]) -> None:
    """Before anything is read."""
    assert "must" in _call(trained, *args, code=78)
