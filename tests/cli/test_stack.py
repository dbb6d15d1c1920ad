"""``torchrelay up`` and ``down`` for real, and what a newcomer does with them: a run through Prefect, looked at, verified and exported."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from torchrelay.cli.console import read_env_file
from torchrelay.cli.prefect_api import PrefectAPI
from torchrelay.config import RunSpec, TrainSpec, spec_to_dict
from torchrelay.errors import ConfigError

_ROOT = Path(__file__).parents[2]
_TINY = (
    "--set",
    "run.job=torchrelay.testing.tiny:build",
    "--set",
    "run.total_steps=20",
    "--set",
    "save.interval_steps=5",
)


class Stack:
    """The command line with a folder of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        unwanted = ("TORCHRELAY_", "PREFECT_", "AWS_")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        self.environ |= {"TORCHRELAY_HOME": str(home)}

    def call(self, *args: str, expect: int = 0, cwd: Path = _ROOT) -> str:
        """Run a command and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "torchrelay.cli", *args],
            env=self.environ,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        assert done.returncode == expect, (args, done.returncode, done.stdout[-3000:], done.stderr[-3000:])
        return done.stdout + done.stderr

    def up(self) -> str:
        """Start it, on a port nobody uses."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return self.call("up", "--port", str(port))

    def pids(self) -> dict[str, int]:
        """Process ids by service."""
        return {path.stem: json.loads(path.read_text())["pid"] for path in (self.home / "pids").glob("[a-z]*.json")}

    def settings(self) -> dict[str, str]:
        """What ``up`` wrote down."""
        return read_env_file(self.home / "env")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that all tests of this module share."""
    stack = Stack(tmp_path_factory.mktemp("home"))
    try:
        stack.up()
        yield stack
    finally:
        stack.call("down")


def test_up_again_changes_nothing(stack: Stack) -> None:
    """It says what runs; the processes are the same."""
    before = stack.pids()
    assert set(before) == {"store", "server", "flows"}
    printed = stack.call("up")
    assert printed.count("was running") == 3
    assert stack.pids() == before


def test_keys_are_private(stack: Stack) -> None:
    """The file is for its owner; what is printed or logged holds no key."""
    assert stat.S_IMODE((stack.home / "env").stat().st_mode) == 0o600
    known = stack.settings()
    said = stack.call("up") + "".join(path.read_text(errors="replace") for path in (stack.home / "logs").iterdir())
    for name in ("TORCHRELAY_ACCESS_KEY", "TORCHRELAY_SECRET_KEY"):
        assert len(known[name]) >= 20
        assert known[name] not in said


def test_a_newcomers_first_run(stack: Stack, tmp_path: Path) -> None:
    """Train through Prefect, follow it, look at it, verify and export it; the same command again has nothing to do."""
    printed = stack.call("train", "--run-id", "first", *_TINY)
    assert "/runs/flow-run/" in printed
    assert "step 20 of 20 is committed" in printed
    assert "flow run: Completed" in printed
    again = stack.call("train", "--run-id", "first", *_TINY)
    assert "nothing was done" in again
    (row,) = [row for row in json.loads(stack.call("runs", "--json")) if row["run"] == "first"]
    assert (row["committed"], row["of"], row["state"], row["generations"]) == (20, 20, "finished", 1)
    assert "finished" in stack.call("runs")
    shown = stack.call("show", "first")
    assert "torchrelay.testing.tiny:build" in shown
    assert "step 20 of 20" in shown
    # How many there are depends on the machine: while one save is under way, the next one is left out.
    steps = [row["step"] for row in json.loads(stack.call("checkpoints", "first", "--json"))]
    assert steps[-1] == 20
    assert f"{len(steps)} of {len(steps)} checkpoints are whole" in stack.call("verify", "first")
    stack.call("export", "first", "--step", str(steps[0]), "--output", str(tmp_path / "w.safetensors"))
    assert (tmp_path / "w.safetensors").stat().st_size > 1000
    assert "exists" in stack.call("export", "first", "--output", str(tmp_path / "w.safetensors"), expect=78)


def test_the_server_refuses_what_the_form_does_not_have(stack: Stack) -> None:
    """A misspelt field or value of a REST client or schedule is a 409 with its reason, not a run."""
    api = PrefectAPI(stack.settings())
    deployment = api._call("GET", "/deployments/name/train/train")["id"]
    spec = spec_to_dict(TrainSpec(run=RunSpec(run_id="typo")))
    bad: list[dict[str, Any]] = [
        {**spec, "segment_step": 3},
        {**spec, "run": {**spec["run"], "total_steps": "many"}},
        {"run": {}},
    ]
    for spoilt in bad:
        body: dict[str, Any] = {"parameters": {"spec": spoilt}}
        with pytest.raises(ConfigError, match="409"):
            api._call("POST", f"/deployments/{deployment}/create_flow_run", body)


def test_a_run_with_another_spec_makes_no_flow_run(stack: Stack) -> None:
    """The command says what differs, before it asks Prefect for anything."""
    stack.call("train", "--run-id", "mine", *_TINY)
    printed = stack.call("train", "--run-id", "mine", *_TINY, "--set", "run.seed=5", expect=73)
    assert "seed: the run has 0, this spec has 5" in printed
    assert "/runs/flow-run/" not in printed


@pytest.mark.drill
@pytest.mark.parametrize("name", ["store", "server", "flows"])
def test_what_fell_is_started_again_on_the_same_data(stack: Stack, name: str) -> None:
    """Each service killed by pid: ``up`` starts it and leaves the others alone; runs and flow runs are still there."""
    stack.call("train", "--run-id", "kept", *_TINY)
    before = stack.pids()
    os.kill(before[name], signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{before[name]}").exists() or _is_zombie(before[name]), what="its end")
    printed = stack.call("up")
    assert printed.count("was running") == 2
    after = stack.pids()
    assert {key for key in after if after[key] != before[key]} == {name}
    assert any(row["run"] == "kept" for row in json.loads(stack.call("runs", "--json")))
    assert "nothing was done" in stack.call("train", "--run-id", "kept", *_TINY)


@pytest.mark.drill
def test_down_saves_first_and_leaves_nothing_running(tmp_path: Path) -> None:
    """A run under way commits the step it has reached; all processes are gone; ``up`` finds the data, on other ports if need be."""
    stack = Stack(tmp_path / "home")
    try:
        stack.up()
        steps = (
            "--set",
            "run.total_steps=4000",
            "--set",
            "save.interval_steps=1000",
            "--set",
            "run.options.sleep_s=0.02",
        )
        stack.call("train", "--run-id", "long", "--detach", "--set", "run.job=torchrelay.testing.tiny:build", *steps)
        wait_until(lambda: _generations(stack, "long"), timeout_s=60, what="the first generation")
        pids = stack.pids()
        stack.call("down")
        assert not stack.pids()
        assert all(not Path(f"/proc/{pid}").exists() for pid in pids.values())
        assert "stopping" not in stack.call("down")  # again: nothing to do
        taken = int(stack.settings()["TORCHRELAY_S3_ENDPOINT"].rpartition(":")[2])
        with socket.create_server(("127.0.0.1", taken)):
            stack.up()
        assert stack.settings()["TORCHRELAY_S3_ENDPOINT"].rpartition(":")[2] != str(taken)
        (generation,) = _generations(stack, "long")
        assert generation["outcome"]["kind"] == "preempted"
    finally:
        stack.call("down", "--wipe")
    assert not (stack.home / "store").exists()
    assert not (stack.home / "env").exists()


def _generations(stack: Stack, run: str) -> list[dict[str, Any]]:
    """Generations of a run; none while it does not exist."""
    known = [row["run"] for row in json.loads(stack.call("runs", "--json"))]
    found: list[dict[str, Any]] = json.loads(stack.call("show", run, "--json"))["generations"] if run in known else []
    return found


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
