"""``torchrelay export --format dcp`` and ``torchrelay import``: out and in again, bit for bit, and nothing that could run code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.programs.dcp_ranks import Trained, digest
from torchrelay import Checkpointer, TrainingState
from torchrelay.checkpoint.generation import list_runs
from torchrelay.errors import ConfigError
from torchrelay.state.dcp_folder import problem_of_metadata
from torchrelay.state.intake import read_source, take_in
from torchrelay.store import open_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def _call(folder: Path, *args: object, code: int = 0) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHRELAY_", "AWS_"))}
    command = [sys.executable, "-m", "torchrelay.cli", *map(str, args), "--store", f"file://{folder / 'store'}"]
    environ = {**kept, "TORCHRELAY_HOME": str(folder / "home")}
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, (args, done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _restored(folder: Path, run: str, *, optimizer: bool = True) -> tuple[dict[str, Any], int]:
    """What a program that goes on from the run has."""
    fresh = Trained(seed=5)
    state = TrainingState(model=fresh.model, optimizer=fresh.optimizer if optimizer else None)
    with Checkpointer(state, run=run, store=f"file://{folder / 'store'}") as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        checkpointer.save(restored.step + 1).result(60)
    whole = _whole(fresh.model, fresh.optimizer)
    return (whole if optimizer else {"model": whole["model"]}), restored.step


def test_out_to_dcp_and_in_again(tmp_path: Path) -> None:
    """A run's export loads with FileSystemReader and through dcp_to_torch_save; imported, it is the first checkpoint of a run that goes on."""
    source = Trained()
    whole = _whole(source.model, source.optimizer)
    state = TrainingState(model=source.model, optimizer=source.optimizer)
    with Checkpointer(state, run="from", store=f"file://{tmp_path / 'store'}") as checkpointer:
        checkpointer.save(7).result(60)
    assert "the whole state at step 7" in _call(tmp_path, "export", "from", "--format", "dcp", "--output", "folder")
    other = Trained(seed=1)
    loaded = _whole(other.model, other.optimizer)
    dcp.load(loaded, checkpoint_id=tmp_path / "folder")
    assert digest(loaded) == digest(whole)
    dcp_to_torch_save(tmp_path / "folder", tmp_path / "whole.pt")
    assert digest(torch.load(tmp_path / "whole.pt", weights_only=True)["model"]) == digest(whole["model"])
    assert "exists" in _call(tmp_path, "export", "from", "--format", "dcp", "--output", "folder", code=78)
    words = ("export", "from", "--format", "dcp", "--output", "folder", "--force", "--component")
    assert "it has: model, optimizer" in _call(tmp_path, *words, "ema", code=66)
    said = _call(tmp_path, "import", "folder", "--run-id", "to", "--step", 7)
    assert "run to: step 7 is committed: model, optimizer" in said
    restored, step = _restored(tmp_path, "to")
    assert (digest(restored), step) == (digest(whole), 7)
    _call(tmp_path, *words, "model")
    flat = Trained(seed=2).model.state_dict()
    dcp.load(flat, checkpoint_id=tmp_path / "folder")
    assert digest(dict(flat)) == digest(dict(whole["model"]))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_files_of_torch_save_come_in(tmp_path: Path) -> None:
    """As tutorials write them, with a wrapper's prefix, as a bare state dict, and in the old format; our own export keeps its step."""
    source = Trained()
    whole = _whole(source.model, source.optimizer)
    wrapped = OrderedDict((f"module.{name}", tensor) for name, tensor in whole["model"].items())
    torch.save({"model_state_dict": wrapped, "optimizer_state_dict": whole["optimizer"], "epoch": 3}, tmp_path / "a.pt")
    said = _call(tmp_path, "import", "a.pt", "--run-id", "a")
    assert "step 1 is committed: model, optimizer" in said
    assert "left out: epoch" in said
    restored, step = _restored(tmp_path, "a")
    assert (digest(restored), step) == (digest(whole), 1)
    torch.save(whole["model"], tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    _call(tmp_path, "import", "b.pt", "--run-id", "b", "--step", 40)
    bare, step = _restored(tmp_path, "b", optimizer=False)
    assert (digest(bare), step) == (digest({"model": dict(whole["model"])}), 40)
    named = source.state(0)  # the optimizer's state by the names of parameters, as DCP's own tools make it
    dcp.save(named, storage_writer=dcp.FileSystemWriter(tmp_path / "folder"))
    intake = read_source(tmp_path / "folder")
    assert (list(intake.components), intake.left_out) == (["model", "optimizer"], ("epoch",))
    take_in(open_store(f"file://{tmp_path / 'store'}"), intake, run_id="d")
    assert digest(_restored(tmp_path, "d")[0]) == digest(whole)
    _call(tmp_path, "export", "a", "--format", "torch", "--output", "c.pt")
    _call(tmp_path, "import", "c.pt", "--run-id", "c", "--component", "model")
    assert _restored(tmp_path, "c", optimizer=False)[1] == 2


class _Odd:
    """Something that only a pickle can hold."""


def test_what_cannot_come_in_is_told(tmp_path: Path) -> None:
    """Each with a hint: what is not there, not ours, not plain, or there already; none leaves a run behind."""
    torch.save({"weights": torch.ones(2), "odd": 1}, tmp_path / "odd.pt")
    torch.save({"model": {"w": torch.ones(2)}, "odd": _Odd()}, tmp_path / "unsafe.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pt")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "folder").mkdir()
    for name, only, told in (
        ("odd.pt", [], "its keys are: odd, weights"),
        ("unsafe.pt", [], "nothing that could run code"),
        ("text.pt", [], "text.pt cannot be loaded"),
        ("folder", [], r"no \.metadata"),
        ("good.pt", ["ema"], "it has: model"),
    ):
        with pytest.raises(ConfigError, match=told):
            read_source(tmp_path / name, only=only)
    _call(tmp_path, "import", "good.pt", "--run-id", "there")
    assert "another --run-id" in _call(tmp_path, "import", "good.pt", "--run-id", "there", code=73)
    assert "there is no no.pt" in _call(tmp_path, "import", "no.pt", "--run-id", "x", code=66)
    assert "not usable as a name" in _call(tmp_path, "import", "good.pt", "--run-id", "../x", code=78)
    assert "its keys are" in _call(tmp_path, "import", "odd.pt", "--run-id", "x", code=78)
    assert list_runs(open_store(f"file://{tmp_path / 'store'}")) == ["there"]


def test_metadata_that_names_anything_else_is_refused(tmp_path: Path) -> None:
    """DCP's own metadata is plain; the same with another name in it, by any way of naming, is not."""
    dcp.save({"a": torch.ones(3), "b": [1, 2]}, storage_writer=dcp.FileSystemWriter(tmp_path))
    good = (tmp_path / ".metadata").read_bytes()
    assert problem_of_metadata(good) == ""
    assert "names pathlib.evilxPath" in problem_of_metadata(good.replace(b"PosixPath", b"evilxPath"))
    assert "names os.system" in problem_of_metadata(b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x8c\x02id\x85R.")
    assert "instruction GLOBAL" in problem_of_metadata(b"\x80\x02cos\nsystem\n.")
    sly = b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x8c\x05torch\x94\x8c\x04Size\x94\x30\x30\x93."  # drops the harmless names
    assert "instruction POP" in problem_of_metadata(sly)
    assert problem_of_metadata(good[:-9]).startswith("it is damaged")
