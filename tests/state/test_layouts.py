"""Any layout takes over from any other: FSDP2, HSDP, tensor parallel, DDP, ZeroRedundancyOptimizer, one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.launch.rendezvous import free_port

_PROGRAM = Path(__file__).parent.parent / "programs" / "layouts.py"


def _run(layout: str, ranks: int, *words: object) -> dict[str, str]:
    """Run one leg of the relay; returns what rank 0 said."""
    base = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(_PROGRAM.parent.parent.parent),
    }
    store, run, *rest = map(str, words)
    command = [sys.executable, str(_PROGRAM), store, run, layout, *rest]
    processes = [
        subprocess.Popen(
            command,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(errors[-3000:] for _, errors in printed)
    lines = [line.rsplit(" ", 1) for line in printed[0][0].splitlines()]
    return dict(lines)


_RELAY = [("single", 1), ("fsdp", 3), ("hsdp", 4), ("zero", 2), ("tp", 2), ("ddp", 2)]
_DRILL = pytest.mark.drill  # each process start costs seconds


def test_a_relay_of_layouts_loses_no_bit(tmp_path: Path) -> None:
    """Each leg finds every byte of parameters, buffers and optimizer state that the leg before it saved, trains, and hands over."""
    store = f"file://{tmp_path}"
    saved = "nothing"
    for layout, ranks in _RELAY:
        said = _run(layout, ranks, store, "relay", 2)
        assert said["restored"] == saved, f"{layout} on {ranks}"
        saved = said["saved"]


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp", 2), pytest.param("zero", 2, marks=_DRILL)])
def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path, layout: str, ranks: int) -> None:
    """Stopped and resumed equals unbroken: every loss, and at the end every byte."""
    store = f"file://{tmp_path}"
    whole = _run(layout, ranks, store, "whole", 6)
    _run(layout, ranks, store, "halves", 3)
    rest = _run(layout, ranks, store, "halves", 3)
    assert rest["saved"] == whole["saved"]
    assert all(rest[f"loss {step}"] == whole[f"loss {step}"] for step in range(3, 6))


@pytest.mark.parametrize(("layout", "ranks"), [("single", 1), pytest.param("fsdp", 2, marks=_DRILL)])
def test_a_snapshot_that_mixes_two_states_is_refused(tmp_path: Path, layout: str, ranks: int) -> None:
    """State that is changed outside of a step while it may be copied: the save fails and says so; training goes on and the next one is whole."""
    said = _run(layout, ranks, f"file://{tmp_path}", "torn", 4, 2)
    assert said["torn"] == "CorruptionError"
    assert _run(layout, ranks, f"file://{tmp_path}", "torn", 1)["restored"] == said["saved"]
