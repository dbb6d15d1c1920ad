"""The example of an own loop: ten added lines, and they hold what they promise."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.launching import final_state
from tests.waiting import wait_until
from torchrelay.checkpoint.history import read_history
from torchrelay.store import open_store

_PROGRAM = Path(__file__).parents[2] / "examples/own_loop.py"
_STEPS = 1000  # far more than are done between a commit and the kill


def _start(store: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(_PROGRAM), "--store", store, "--steps", str(_STEPS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_ten_lines_are_added() -> None:
    """That is the promise of the first page."""
    added = re.findall(r"^.*# \+$", _PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
    assert 5 <= len(added) <= 10


def test_killed_and_run_again_it_equals_the_run_that_was_not(tmp_path: Path) -> None:
    """SIGKILL after a commit; the same command again; the same losses and the same bytes as the unbroken one."""
    broken, whole = f"file://{tmp_path / 'broken'}", f"file://{tmp_path / 'whole'}"
    with _start(broken) as first:
        wait_until(lambda: _committed(broken), timeout_s=60, what="a commit")
        first.kill()
    assert first.returncode == -signal.SIGKILL
    assert 25 <= _committed(broken) < _STEPS
    first_steps = {store: _run_to_the_end(store) for store in (broken, whole)}
    assert first_steps[whole] == 25
    assert first_steps[broken] > 25  # it went on, and did not begin again
    assert _committed(broken) == _committed(whole) == _STEPS
    assert final_state(broken, "own-loop") == final_state(whole, "own-loop")


def _committed(store: str) -> int:
    latest = read_history(open_store(store), "own-loop").latest
    return latest.step if latest else 0


def _run_to_the_end(store: str) -> int:
    """Run it, and return the first step it told of."""
    with _start(store) as program:
        printed, _ = program.communicate(timeout=120)
    assert program.returncode == 0, printed
    steps = re.findall(r"^step (\d+) loss", printed, re.MULTILINE)
    assert int(steps[-1]) == _STEPS
    return int(steps[0])
