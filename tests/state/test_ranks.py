"""Several ranks of a user's own loop: bit-exact resume at one world size, one data order at any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrelay.launch.rendezvous import free_port

_PROGRAM = Path(__file__).parent.parent / "programs" / "own_ranks.py"


def _run(ranks: int, *words: object) -> tuple[dict[str, str], list[int]]:
    """Run the program on some ranks; return what rank 0 printed (last value of each name) and the exit codes."""
    base = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    folder = str(_PROGRAM.parent.parent.parent)
    processes = [
        subprocess.Popen(
            [sys.executable, str(_PROGRAM), *map(str, words)],
            env={**os.environ, **base, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=120) for process in processes]
    codes = [process.returncode for process in processes]
    lines = [line.rsplit(" ", 1) for line in printed[0][0].splitlines()]
    assert lines or any(codes), printed
    return dict(lines), codes


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_costs_nothing_but_the_steps_since_the_last_commit(tmp_path: Path, ranks: int) -> None:
    """Losses, parameters and ledger of the resumed program equal those of the unbroken one, for two ranks and for three."""
    store = f"file://{tmp_path}/store"
    whole, codes = _run(ranks, store, "whole", 12, 4)
    assert codes == [0] * ranks
    broken, codes = _run(ranks, store, "broken", 12, 4, 6)
    assert codes[1] == -9
    assert "loss 4" in broken
    resumed, codes = _run(ranks, store, "broken", 12, 4)
    assert codes == [0] * ranks
    assert "loss 4" not in resumed
    assert "loss 5" in resumed
    assert {**broken, **resumed} == whole


def test_another_world_size_takes_over_with_the_same_data(tmp_path: Path) -> None:
    """Two ranks go on where three stopped: the ledger of consumed samples is the same."""
    store = f"file://{tmp_path}/store"
    whole, _ = _run(1, store, "whole", 12, 4)
    _run(3, store, "elastic", 8, 4)
    resumed, codes = _run(2, store, "elastic", 12, 4)
    assert codes == [0, 0]
    assert "loss 8" not in resumed
    assert resumed["ledger"] == whole["ledger"]
