"""What the pages show is run: the reader in format.md on a real run, and the tutorial from its job to its export."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import Launch, tiny_spec
from torchrelay.testing.tiny import fail_at

_ROOT = Path(__file__).parents[1]


def _blocks(page: str, language: str) -> list[str]:
    text = (_ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_a_checkpoint_is_readable_from_its_description_alone(tmp_path: Path) -> None:
    """The program in format.md, which knows nothing of this library, reads the run: two generations, two ranks."""
    spec = tiny_spec(
        f"file://{tmp_path}", "readable", ranks=2, steps=20, fail_at=fail_at(0, 12, flag=tmp_path / "flag")
    )
    assert Launch(spec).outcome().kind == "killed"
    assert Launch(spec).outcome().kind == "completed"
    (program,) = _blocks("format.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "runs/readable")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"step 20: \d+ tensors, \d+ bytes, loss \d", done.stdout)


def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    """Its job, its spec and each of its commands, in an empty folder; the model learns."""
    (job,), (spec,) = _blocks("tutorial.md", "python"), _blocks("tutorial.md", "toml")
    (tmp_path / "spirals.py").write_text(job)
    (tmp_path / "spirals.toml").write_text(spec)
    folder = Path(sys.executable).parent
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHRELAY_", "PREFECT_"))}
    environ["PATH"] = f"{folder}:{environ['PATH']}"
    printed = []
    for block in _blocks("tutorial.md", "sh"):
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, (block, done.stdout[-2000:], done.stderr[-2000:])
        printed.append(done.stdout)
    first, again, looked_at = printed
    assert "run spirals-1 is finished: step 600 is committed" in first
    assert "nothing was done" in again
    assert "checkpoints are whole" in looked_at
    before, after = map(float, re.findall(r"([\d.]+) at step", looked_at))
    assert after < before / 2
    assert (tmp_path / "spirals.safetensors").stat().st_size > 5000


@pytest.mark.parametrize("page", sorted(path.name for path in (_ROOT / "docs").glob("*.md")))
def test_lines_of_pages_are_not_too_long(page: str) -> None:
    """Prose is wrapped at 220 characters at most; only tables may be wider."""
    text = (_ROOT / "docs" / page).read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if len(line) > 220 and not line.startswith("|")]
