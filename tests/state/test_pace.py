"""The caps of a courier."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from torchrelay.state.capture import TrainingState
from torchrelay.state.checkpointer import Checkpointer
from torchrelay.state.pace import Pace


def test_bytes_are_held_back_to_their_cap() -> None:
    """The first piece goes at once, each later one when the ones before have had their time."""
    began = time.monotonic()
    pace = Pace(bytes_per_s=1000.0)
    for _ in range(5):
        pace.send(100)
    assert time.monotonic() - began >= 0.4


def test_processor_time_is_held_back_to_its_share() -> None:
    """After a burst of work a thread waits until the share is kept again."""
    began = time.monotonic()
    pace, burnt = Pace(cores=0.25), time.process_time()
    while time.process_time() - burnt < 0.1:
        pass
    pace.work()
    assert time.monotonic() - began >= 0.38


def test_nothing_is_held_back_without_caps_or_after_the_end() -> None:
    """No caps: a thread never waits; and a courier that nobody trains beside any more is not slowed down."""
    free, stopped = Pace(), Pace(bytes_per_s=1.0, cores=1e-6)
    stopped.stop()
    for pace in (free, stopped):
        for _ in range(1000):
            pace.send(2**30)
            pace.work()


def test_a_capped_courier_keeps_its_rate(tmp_path: Path) -> None:
    """Eight packs' worth of state at 200 MiB/s take more than two seconds to be written, and are committed all the same."""
    model = nn.Linear(1024, 8 * 16 * 1024 + 1, bias=False)  # 512 MiB and a little: nine packs
    with torch.no_grad():
        model.weight.uniform_()
    state = TrainingState(model=model)
    with Checkpointer(state, run="capped", store=f"file://{tmp_path}", upload_mib_s=200.0) as checkpointer:
        checkpointer.restore()
        began = time.monotonic()
        assert checkpointer.save(1).result(120) == 1
        assert time.monotonic() - began >= 2.0
