"""The courier dies at each of its store calls, is started again by its owner, and the checkpoint is committed in the end, once and whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from tests.waiting import wait_until
from torchrelay.checkpoint.generation import open_run, start_generation
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import manifests_prefix
from torchrelay.checkpoint.reader import load_manifest, verify_checkpoint
from torchrelay.checkpoint.regions import read_tensors
from torchrelay.config import RunSpec
from torchrelay.state.capture import TrainingState
from torchrelay.state.checkpointer import Checkpointer, PendingCheckpoint
from torchrelay.state.request import GenerationRequest
from torchrelay.store import open_store
from torchrelay.testing.clock import FakeClock

_PROGRAM = Path(__file__).parent.parent / "programs" / "dying_courier.py"
_CALLS = 18  # of two saves
Effect = Literal["before", "after"]


class _Owner:
    """Starts a generation as a launcher does, and its courier: first one that dies, then ones that live."""

    def __init__(self, folder: Path, environ: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.store = open_store(f"file://{folder}/store")
        self.work = folder / "work"
        self.work.mkdir()
        environ.setenv("TORCHRELAY_WORKDIR", str(self.work))
        spec = RunSpec(run_id="r", total_steps=100)
        open_run(self.store, spec, provenance={})
        claim = start_generation(self.store, "r", info={}, lease_s=1.0, clock=FakeClock())
        GenerationRequest(
            run_id="r",
            generation=claim.generation,
            begin_key=claim.begin_key,
            store_url=self.store.url,
            spec={"digest": spec.digest(), "seed": 1},
        ).write(self.work)
        self.courier: subprocess.Popen[bytes] | None = None
        self.deaths = 0

    def start(self, die_at: int = 0, effect: Effect = "before") -> None:
        """Start a courier."""
        root = str(_PROGRAM.parents[2])
        with (self.folder / "courier.log").open("ab") as log:
            self.courier = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(die_at), effect],
                env={**os.environ, "RANK": "0", "PYTHONPATH": root},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def tended_until_end_of(self, pending: PendingCheckpoint) -> bool:
        """Start the courier again if it has died; returns whether the save has ended."""
        assert self.courier is not None
        if self.courier.poll() not in (None, 0):
            assert self.courier.returncode == -9, (self.folder / "courier.log").read_text()
            self.deaths += 1
            self.start()
        return pending.state in ("committed", "failed")

    def calls(self) -> list[str]:
        """What the courier that lived has asked of the store."""
        assert self.courier is not None
        assert self.courier.wait(30) == 0
        return (self.work / "calls").read_text().splitlines()


class _Net(nn.Module):
    """A parameter and buffers of several types; every value tells at which step it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300, 40))
        self.coarse = nn.Buffer(torch.zeros(33, dtype=torch.bfloat16))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def fill(self, step: int) -> None:
        """Set everything."""
        with torch.no_grad():
            self.weight.copy_(torch.arange(12000.0).reshape(300, 40) + step)
            self.coarse.fill_(step)
            self.count.fill_(step)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Owner]:
    """The owner of one run; its courier is gone at the end."""
    made = _Owner(tmp_path, monkeypatch)
    yield made
    if made.courier is not None:
        made.courier.kill()
        made.courier.wait(10)


def _save_with_a_death(owner: _Owner, die_at: int, effect: Effect) -> None:
    """Two saves, the second of which changes only a part; the courier dies once. Both are waited for, and everything is checked."""
    model, expected = _Net(), dict[int, dict[str, bytes]]()
    owner.start(die_at, effect)
    checkpointer = Checkpointer(TrainingState(model=model), run="r")
    assert checkpointer.restore() is None
    for step in (1, 2):
        model.fill(1)
        model.count.fill_(step)
        expected[step] = {f"model/{name}": _bytes(value) for name, value in model.state_dict().items()}
        pending = checkpointer.save(step)
        wait_until(partial(owner.tended_until_end_of, pending), what=f"the commit of step {step}")
        assert pending.result(0) == step
    checkpointer.close()
    line = read_history(owner.store, "r").line
    assert [ref.step for ref in line] == [1, 2]
    assert len(owner.store.list(manifests_prefix("r")).objects) == 2
    for ref in line:
        verify_checkpoint(owner.store, "r", ref)
        manifest = load_manifest(owner.store, "r", ref)
        buffers = {name: bytearray(meta.size_bytes) for name, meta in manifest.tensors.items()}
        read_tensors(owner.store, manifest, {name: memoryview(data) for name, data in buffers.items()})
        assert {name: bytes(data) for name, data in buffers.items()} == expected[ref.step]


def test_a_courier_that_lives_makes_few_calls(owner: _Owner) -> None:
    """The calls of two saves: these are the places to die at."""
    _save_with_a_death(owner, 0, "before")
    calls = owner.calls()
    assert owner.deaths == 0
    assert len(calls) == _CALLS, calls
    assert sum(call.startswith("put runs/r/manifests/") for call in calls) == 2


def _places() -> Iterator[Any]:
    """Every call, before and after it took effect; those of the first commit, and the last, are always tried."""
    for number in range(1, _CALLS + 1):
        for effect in ("before", "after"):
            always = (number, effect) in [
                (2, "after"),
                (4, "before"),
                (5, "after"),
                (7, "after"),
                (8, "after"),
                (18, "after"),
            ]
            yield pytest.param(number, effect, marks=() if always else pytest.mark.drill)


@pytest.mark.parametrize(("die_at", "effect"), list(_places()))
def test_a_courier_that_dies_anywhere_costs_nothing(owner: _Owner, die_at: int, effect: Effect) -> None:
    """Killed at this call: nobody waits in vain, both checkpoints are committed, each once, bit for bit."""
    _save_with_a_death(owner, die_at, effect)
    assert owner.deaths == 1
