"""The image's entry point: secrets reach the command, and only the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.entrypoint import with_secrets

ROOT = Path(__file__).resolve().parents[2]


def test_secret_files_become_variables(tmp_path: Path) -> None:
    """NAME_FILE below the secrets folder turns into NAME, without the line break an editor adds."""
    (tmp_path / "key").write_text("s3cret\n", encoding="utf-8")
    result = with_secrets({"A_KEY_FILE": str(tmp_path / "key"), "OTHER": "1"}, tmp_path)
    assert result == {"A_KEY": "s3cret", "OTHER": "1"}


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """A certificate's path is no secret, wherever its variable's name ends."""
    environ = {"TORCHRELAY_S3_CA_FILE": "/etc/ssl/ca.pem", "EMPTY_FILE": ""}
    assert with_secrets(environ, tmp_path) == environ


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_missing_or_empty_secret_is_an_error(tmp_path: Path, content: str | None) -> None:
    """A stack without credentials stops at once instead of running open."""
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises((OSError, ValueError), match="key"):
        with_secrets({"A_KEY_FILE": str(path)}, tmp_path)


def test_two_sources_for_one_variable_are_refused(tmp_path: Path) -> None:
    """Nobody has to guess which of two values wins."""
    (tmp_path / "key").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match="both A_KEY and A_KEY_FILE"):
        with_secrets({"A_KEY": "y", "A_KEY_FILE": str(tmp_path / "key")}, tmp_path)


def start(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point as the image does."""
    command = [sys.executable, "-m", "infra.entrypoint", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)


def test_the_command_replaces_the_entry_point() -> None:
    """Arguments and exit code pass through unchanged."""
    done = start(sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:])); sys.exit(7)", "a b", "--c")
    assert json.loads(done.stdout) == ["a b", "--c"]
    assert done.returncode == 7


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_a_command_that_cannot_start_is_reported(argv: list[str]) -> None:
    """One line on stderr says why, and the exit code is not zero."""
    done = start(*argv)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
