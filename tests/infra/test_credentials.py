"""Credentials are generated once, never changed, and closed to others."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

from infra import credentials
from infra.credentials import BUCKET, write_credentials


def contents(folder: Path) -> dict[str, str]:
    """Return every file of the folder by name."""
    return {path.name: path.read_text("utf-8") for path in sorted(folder.iterdir())}


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    """Running it again keeps every credential, so data stay readable."""
    assert write_credentials(tmp_path) != []
    before = contents(tmp_path)
    assert write_credentials(tmp_path) == []
    assert contents(tmp_path) == before


def test_a_lost_file_is_replaced_alone(tmp_path: Path) -> None:
    """Only what is missing is written, and what is derived follows."""
    write_credentials(tmp_path)
    before = contents(tmp_path)
    (tmp_path / "training_secret_key").unlink()
    assert write_credentials(tmp_path) == ["training_secret_key"]
    after = contents(tmp_path)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"training_secret_key", "seaweedfs_s3.json"}
    assert after["training_secret_key"] in after["seaweedfs_s3.json"]


def test_credentials_are_long_random_and_different(tmp_path: Path) -> None:
    """Two stacks share no credential, and no two credentials of one stack are equal."""
    write_credentials(tmp_path / "a")
    write_credentials(tmp_path / "b")
    values = [value for name in "ab" for value in contents(tmp_path / name).values()]
    assert len(set(values)) == len(values)
    assert all(len(value) >= 20 for value in values)


def test_other_users_of_the_machine_cannot_enter(tmp_path: Path) -> None:
    """The folder is closed; the files in it can be read by whatever user a container runs as."""
    folder = tmp_path / "secrets"
    previous = os.umask(0o077)
    try:
        write_credentials(folder)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o444}


def test_the_second_key_reaches_one_bucket(tmp_path: Path) -> None:
    """The identity file gives the training key three verbs in one bucket, and no administration."""
    write_credentials(tmp_path)
    root, training = json.loads((tmp_path / "seaweedfs_s3.json").read_text("utf-8"))["identities"]
    assert "Admin" in root["actions"]
    assert training["actions"] == [f"Read:{BUCKET}", f"Write:{BUCKET}", f"List:{BUCKET}"]
    assert training["credentials"][0]["accessKey"] == (tmp_path / "training_access_key").read_text("utf-8")


def test_it_runs_before_anything_is_installed() -> None:
    """The script needs the standard library only: an isolated interpreter without site packages can load it."""
    load = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='loaded')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", load, str(credentials.__file__)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
