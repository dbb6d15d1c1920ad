"""The example of an own loop: ten added lines, and they hold what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.launching import final_state
from tests.waiting import wait_until
from torchrelay.checkpoint.history import read_history
from torchrelay.store import open_store

_PROGRAM = Path(__file__).parents[2] / "examples/own_loop.py"


def _start(store: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(_PROGRAM), "--store", store, "--steps", "1500"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_ten_lines_are_added() -> None:
    """That is the promise of the first page."""
    added = re.findall(r"^.*# \+$", _PROGRAM.read_text(encoding="utf-8"), re.MULTILINE)
    assert 5 <= len(added) <= 10


def test_killed_and_run_again_it_equals_the_run_that_was_not(tmp_path: Path) -> None:
    """SIGKILL after a commit; the same command again; the same losses and the same bytes as the unbroken one."""
    broken, whole = f"file://{tmp_path / 'broken'}", f"file://{tmp_path / 'whole'}"
    with _start(broken) as first:
        wait_until(lambda: read_history(open_store(broken), "own-loop").latest, timeout_s=60, what="a commit")
        first.kill()
    for store in (broken, whole):
        with _start(store) as program:
            printed, _ = program.communicate(timeout=120)
        assert program.returncode == 0, printed
    assert final_state(broken, "own-loop") == final_state(whole, "own-loop")
