"""A courier that is slower than training: a save waits for the one before it, and memory does not grow."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import torch
from torch import nn

from tests.waiting import wait_until
from torchrelay.checkpoint.history import read_history
from torchrelay.state.capture import TrainingState
from torchrelay.state.checkpointer import Checkpointer, PendingCheckpoint
from torchrelay.store import open_store


def _staging_bytes() -> int:
    """Address space that this process has mapped for staging."""
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "torchrelay-staging" in line]
    return sum(int(high, 16) - int(low, 16) for low, high in (row[0].split("-") for row in rows))


def test_a_save_waits_for_the_one_before_and_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    """With the courier frozen the second call returns only after it has thawed; state and staging together are twice the state, never more."""
    store = f"file://{tmp_path}"
    before = _staging_bytes()
    model = nn.Linear(1024, 4096)
    size = sum(value.numel() * 4 for value in model.parameters())
    later: list[PendingCheckpoint] = []
    with Checkpointer(TrainingState(model=model), run="r", store=store) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1).result(60)
        courier = checkpointer._session._courier
        assert courier is not None
        os.kill(courier.pid, signal.SIGSTOP)
        with torch.no_grad():
            model.weight.add_(1)
        first = checkpointer.save(2)
        first.wait_staged(60)
        assert checkpointer.busy
        second = threading.Thread(target=lambda: later.append(checkpointer.save(3)))
        second.start()
        second.join(0.5)
        assert second.is_alive()
        assert not later
        assert first.state == "staged"
        assert _staging_bytes() - before <= size + 2**16
        os.kill(courier.pid, signal.SIGCONT)
        second.join(60)
        assert not second.is_alive()
        assert first.written
        assert later[0].result(60) == 3
        assert later[0].stall_s >= 0.5
        assert _staging_bytes() - before <= size + 2**16
    wait_until(lambda: _staging_bytes() == before, what="the end of the staging memory")
    assert read_history(open_store(store), "r").line[-1].step == 3
