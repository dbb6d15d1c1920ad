"""The demo is the promise of the first page: it is run as a newcomer runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.drill, pytest.mark.timeout(500)]

_ROOT = Path(__file__).parents[2]


def test_the_demo_proves_what_it_says(tmp_path: Path) -> None:
    """Two kills, losses and parameters equal, exit code 0; afterwards `down` leaves nothing behind."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHRELAY_", "PREFECT_"))}
    environ["TORCHRELAY_HOME"] = str(tmp_path / "home")
    command = [sys.executable, "-m", "torchrelay.cli"]
    try:
        done = subprocess.run(
            [*command, "demo"], env=environ, cwd=_ROOT, capture_output=True, text=True, timeout=400, check=False
        )
    finally:
        subprocess.run([*command, "down"], env=environ, cwd=_ROOT, capture_output=True, timeout=200, check=True)
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    rows = dict(re.findall(r"^(\S.*?) {2,}(\S+)$", done.stdout, re.MULTILINE))
    assert rows["losses equal (450 steps)"] == "yes"
    assert rows["parameters equal (and optimizer state)"] == "yes"
    assert done.stdout.count("with SIGKILL") == 2
