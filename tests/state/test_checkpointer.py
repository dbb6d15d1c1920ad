"""Saving and restoring in one process, with a real courier and a real store."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.waiting import wait_until
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import packs_prefix
from torchrelay.data.dataset import DatasetVersion
from torchrelay.data.sampler import ElasticSampler
from torchrelay.errors import (
    CorruptionError,
    RetryableError,
    RunBusyError,
    RunMismatchError,
    StateMismatchError,
    UnserialisableError,
)
from torchrelay.state.capture import TrainingState
from torchrelay.state.checkpointer import Checkpointer
from torchrelay.state.rng import derive_rng
from torchrelay.store import open_store


class _Program:
    """A small training program: dropout, AdamW, a schedule, noise from three generators."""

    def __init__(self, store: str, *, run: str = "r", width: int = 16) -> None:
        derive_rng(1, step=0, rank=0)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.Tanh(), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.05, total_steps=100)
        self.sampler = ElasticSampler(DatasetVersion("d", "0" * 64, 50), global_batch=4, seed=3)
        self.state = TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, sampler=self.sampler
        )
        self.checkpointer = Checkpointer(self.state, run=run, store=store)

    def train(self, first: int, last: int, on_step: Callable[[int], object] = lambda step: None) -> list[float]:
        losses = []
        for step in range(first, last):
            noise = random.random() + float(np.random.rand())
            loss = (self.model(torch.randn(4, 4) + noise) ** 2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
            on_step(step + 1)
        return losses

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A local folder as the store."""
    return f"file://{tmp_path / 'store'}"


def test_resumed_equals_unbroken_bit_for_bit(store: str) -> None:
    """Losses and parameters after a restore are those of a program that was never stopped."""
    whole = _Program(store, run="whole")
    assert whole.checkpointer.restore() is None
    expected = whole.train(0, 30)
    whole.checkpointer.close()

    first = _Program(store)
    first.checkpointer.restore()
    losses = first.train(0, 10)
    assert first.checkpointer.save(10).result(60) == 10
    first.train(10, 13)  # lost work
    first.checkpointer.close()

    second = _Program(store)
    restored = second.checkpointer.restore()
    assert restored is not None
    assert restored.step == 10
    losses += second.train(10, 30)
    second.checkpointer.close()
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), whole.parameters(), strict=True))


def test_the_snapshot_is_of_its_step_although_training_goes_on(store: str) -> None:
    """The copy runs beside the next forward and backward; the optimizer waits for it."""
    program = _Program(store, width=2000)
    program.checkpointer.restore()
    saved: dict[int, list[torch.Tensor]] = {}

    def save(step: int) -> None:
        saved[step] = program.parameters()
        program.checkpointer.save(step)

    program.train(0, 6, save)
    program.checkpointer.close()
    again = _Program(store, width=2000)
    restored = again.checkpointer.restore()
    assert restored is not None
    assert restored.step == 6
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), saved[6], strict=True))
    again.checkpointer.close()


def test_a_torn_snapshot_is_an_error_and_training_goes_on(store: str) -> None:
    """Changing a parameter behind the optimizer's back while it is copied spoils that save, and only that one."""
    model = nn.Linear(1, 30_000_000)  # 240 MB: the copy takes far longer than the next line
    with Checkpointer(TrainingState(model=model), run="r", store=store) as checkpointer, torch.no_grad():
        checkpointer.restore()
        pending = checkpointer.save(2)
        model.weight[0, 0] += 1
        with pytest.raises(CorruptionError, match="torn"):
            pending.result(60)
        assert checkpointer.save(3).result(120) == 3


def test_a_killed_courier_costs_nothing(store: str) -> None:
    """The staged bytes outlive the courier: a new one gets them again, and the next save works."""
    program = _Program(store)
    program.checkpointer.restore()
    program.train(0, 3)
    program.checkpointer.save(3).result(60)
    courier = program.checkpointer._session._courier
    assert courier is not None
    os.kill(courier.pid, signal.SIGKILL)
    courier.wait(10)
    program.train(3, 5)
    assert program.checkpointer.save(5).result(60) == 5
    program.checkpointer.close()
    latest = read_history(open_store(store), "r").latest
    assert latest is not None
    assert latest.step == 5


def test_a_damaged_newest_checkpoint_is_stepped_over(store: str, tmp_path: Path) -> None:
    """A flipped bit in a pack is found on load; the program goes on from the checkpoint before."""
    program = _Program(store)
    program.checkpointer.restore()
    program.train(0, 2, lambda step: program.checkpointer.save(step).result(60))
    program.checkpointer.close()
    packs = open_store(store).list(packs_prefix("r")).objects
    newest = max(packs, key=lambda item: item.modified_s)
    path = tmp_path / "store" / newest.key
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)
    again = _Program(store)
    restored = again.checkpointer.restore()
    assert restored is not None
    assert restored.step == 1
    assert read_history(open_store(store), "r").damaged
    again.checkpointer.close()


def test_another_program_or_model_is_refused(store: str) -> None:
    """A checkpoint that does not fit says so before anything is changed."""
    program = _Program(store)
    program.checkpointer.restore()
    program.checkpointer.save(0 + 1).result(60)
    program.checkpointer.close()
    other = _Program(store, width=8)
    before = other.parameters()
    with pytest.raises(StateMismatchError, match=r"model\.0\.weight"):
        other.checkpointer.restore()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), before, strict=True))
    other.checkpointer.close()


def test_a_second_program_on_a_live_run_is_refused(store: str) -> None:
    """Two programs cannot train one run at once."""
    program = _Program(store)
    program.checkpointer.restore()
    program.checkpointer.save(1).result(60)
    with pytest.raises(RunBusyError, match="being trained by generation 1"):
        _Program(store)
    program.checkpointer.close()


def test_unserialisable_state_is_named_and_the_run_goes_on(store: str) -> None:
    """A save that cannot be encoded raises in the call; what was committed stays."""

    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"fn": print}

        def load_state_dict(self, state_dict: dict[str, object]) -> None:
            raise AssertionError

    program = _Program(store)
    program.checkpointer.restore()
    program.checkpointer.save(1).result(60)
    program.state.extra = {"odd": Odd()}
    with pytest.raises(UnserialisableError, match=r"odd\.fn"):
        program.checkpointer.save(2)
    program.state.extra = {}
    assert program.checkpointer.save(3).result(60) == 3
    program.checkpointer.close()


def test_run_of_another_kind_is_refused(store: str) -> None:
    """A run id belongs to one spec."""
    from torchrelay.checkpoint.generation import open_run
    from torchrelay.config import RunSpec

    open_run(open_store(store), RunSpec(run_id="r", total_steps=7), provenance={})
    with pytest.raises(RunMismatchError, match="total_steps: the run has 7"):
        _Program(store)


def test_memory_is_given_back(store: str) -> None:
    """Saving many times does not grow the number of open files."""
    program = _Program(store)
    program.checkpointer.restore()
    program.checkpointer.save(1).result(60)
    before = len(os.listdir("/proc/self/fd"))
    program.train(1, 8, lambda step: program.checkpointer.save(step).result(60))
    assert len(os.listdir("/proc/self/fd")) <= before
    program.checkpointer.close()
    wait_until(
        lambda: (
            program.checkpointer._session._courier is None or program.checkpointer._session._courier.poll() is not None
        )
    )


def test_every_save_ends_even_if_a_newer_one_overtakes_its_commit(store: str) -> None:
    """Saves in quick succession: each is committed, or says that a newer one was; none is waited for in vain, and the last is committed."""
    program = _Program(store)
    with program.checkpointer as checkpointer:
        checkpointer.restore()
        pendings = [checkpointer.save(step) for step in range(1, 13)]
        ends, overtaken = [], []
        for pending in pendings:
            try:
                ends.append(pending.result(60))
            except RetryableError as error:
                overtaken.append(str(error))
        assert ends[-1] == 12
        assert all("was not committed" in message for message in overtaken)
    line = read_history(open_store(store), "r").line
    assert [ref.step for ref in line] == ends
