"""Commands without a stack: what they print, their exit codes, and what they say when something is wrong."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launching import tiny_spec, train_to_the_end
from tests.waiting import wait_until
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.cli.console import find_home, read_env_file, settings
from torchrelay.cli.prefect_api import PrefectAPI
from torchrelay.errors import ConfigError
from torchrelay.relay import read_status
from torchrelay.store import open_store
from torchrelay.testing.servers import SeaweedServer

_CLI = [sys.executable, "-m", "torchrelay.cli"]
_TINY = ["--set", "run.job=torchrelay.testing.tiny:build", "--set", "run.global_batch=12"]


def _environ(tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("TORCHRELAY_", "PREFECT_", "AWS_"))
    }
    return {**kept, "TORCHRELAY_HOME": str(tmp_path / "home"), **more}


def _call(tmp_path: Path, *args: str, code: int = 0, environ: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; errors go to stderr, results to stdout."""
    done = subprocess.run(
        [*_CLI, *args],
        env=_environ(tmp_path, **(environ or {})),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, (args, done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with one finished run, ``done``, of two ranks and three checkpoints."""
    url = f"file://{tmp_path_factory.mktemp('trained')}"
    train_to_the_end(tiny_spec(url, "done", ranks=2, steps=30, sleep_s=0.01))
    return url


def test_runs_and_checkpoints_as_text_and_as_json(tmp_path: Path, trained: str) -> None:
    """The same facts for people and for programs."""
    (run,) = json.loads(_call(tmp_path, "runs", "--store", trained, "--json"))
    assert (run["run"], run["committed"], run["of"], run["state"]) == ("done", 30, 30, "finished")
    text = _call(tmp_path, "runs", "--store", trained).splitlines()
    assert text[0].split() == ["run", "committed", "of", "state", "generations", "started"]
    assert text[1].split()[:4] == ["done", "30", "30", "finished"]
    rows = json.loads(_call(tmp_path, "checkpoints", "done", "--store", trained, "--json"))
    assert rows[-1]["step"] == 30
    assert all(row["state"] == "committed" and row["ranks"] == 2 for row in rows)
    shown = json.loads(_call(tmp_path, "show", "done", "--store", trained, "--json"))
    assert shown["finished"]
    assert shown["generations"][0]["outcome"]["kind"] == "completed"
    assert "step 30 of 30" in _call(tmp_path, "show", "done", "--store", trained)


def test_exports_hold_the_weights_bit_for_bit(tmp_path: Path, trained: str) -> None:
    """Both formats agree with each other and name tensors as the model does; other components and steps can be had."""
    _call(tmp_path, "export", "done", "--store", trained)
    _call(tmp_path, "export", "done", "--store", trained, "--format", "torch")
    weights = load_file(tmp_path / "done-step-30.safetensors")
    whole = torch.load(tmp_path / "done-step-30.pt", weights_only=True)
    assert (
        weights.keys()
        == whole["state"]["model"].keys()
        == {f"{i}.{p}" for i in (0, 3, 4, 5) for p in ("weight", "bias")}
    )
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole["state"]["model"].items())
    assert (whole["run_id"], whole["step"], whole["data"]["samples_consumed"]) == ("done", 30, 360)
    assert {"optimizer", "scheduler", "ema"} <= whole["state"].keys()
    step = read_history(open_store(trained), "done").line[0].step
    _call(
        tmp_path,
        "export",
        "done",
        "--store",
        trained,
        "--step",
        str(step),
        "--component",
        "ema",
        "--output",
        "e.safetensors",
    )
    assert not torch.equal(load_file(tmp_path / "e.safetensors")["0.weight"], weights["0.weight"])


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["show", "../x"], 78, ["not usable as a name"]),
        (["show", "nope"], 66, ["no run 'nope'", "there are: done"]),
        (["verify", "done", "--step", "7"], 66, ["no checkpoint of step 7", "its newest: "]),
        (["export", "done", "--component", "optimiser"], 66, ["no component 'optimiser'", "it has: ema"]),
        (["export", "done", "--output", "no/such/folder/x"], 78, ["cannot write"]),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    tmp_path: Path, trained: str, args: list[str], code: int, words: list[str]
) -> None:
    """And with the next thing to do."""
    printed = _call(tmp_path, *args, "--store", trained, code=code)
    assert all(word in printed for word in words), printed


def test_verify_marks_damage_and_takes_the_mark_away(tmp_path: Path) -> None:
    """A flipped byte: exit code 65, loads step over it; flipped back: whole, and the mark is gone."""
    url = f"file://{tmp_path / 'store'}"
    train_to_the_end(tiny_spec(url, "rot", steps=20, sleep_s=0.01))
    pack = max((tmp_path / "store/runs/rot/packs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)
    good = pack.read_bytes()
    pack.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    done = subprocess.run(
        [*_CLI, "verify", "rot", "--store", url], env=_environ(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 65
    assert "step 20: DAMAGED" in done.stdout
    assert "is damaged: the XXH3-128 of the chunk" in done.stdout
    assert ManifestRef(20, 1) in read_history(open_store(url), "rot").damaged
    assert "damaged" in _call(tmp_path, "checkpoints", "rot", "--store", url)
    assert "marked as damaged" in _call(tmp_path, "export", "rot", "--step", "20", "--store", url, code=66)
    pack.write_bytes(good)
    assert "the mark is removed" in _call(tmp_path, "verify", "rot", "--store", url)
    assert not read_history(open_store(url), "rot").damaged


def test_training_here_stops_on_request_and_goes_on(tmp_path: Path) -> None:
    """Ctrl-C: saved, committed, exit code 75; the same command finishes the run, and then has nothing to do."""
    url = f"file://{tmp_path / 'store'}"
    command = ["train", "--local", "--run-id", "mine", "--store", url, *_TINY, "--set", "run.total_steps=150"]
    command += ["--set", "run.options.sleep_s=0.02", "--set", "save.interval_steps=10", "--set", "segment_steps=100"]
    with subprocess.Popen(
        [*_CLI, *command], env=_environ(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as train:
        wait_until(lambda: read_status(open_store(url), "mine").committed_step >= 10, timeout_s=60, what="step 10")
        train.send_signal(signal.SIGINT)
        printed, _ = train.communicate(timeout=60)
    assert train.returncode == 75, printed
    assert "the ranks save and commit first" in printed
    status = read_status(open_store(url), "mine")
    assert status.generations[-1].outcome is not None
    assert status.generations[-1].outcome.kind == "preempted"
    assert f"step {status.committed_step} is committed, the same command goes on" in printed
    assert "run mine is finished: step 150 is committed" in _call(tmp_path, *command)
    assert "nothing was done" in _call(tmp_path, *command)


def test_a_fault_that_comes_back_ends_with_its_timeline(tmp_path: Path) -> None:
    """Exit code 70, the reason, one line per generation and a hint."""
    url = f"file://{tmp_path / 'store'}"
    fault = '{rank = 0, step = 4, how = "raise", where = "step", flag = ""}'
    options = ["--set", f"run.options.fail_at={fault}", "--set", "faults.retry_delay_s=0"]
    printed = _call(tmp_path, "train", "--local", "--run-id", "bug", "--store", url, *_TINY, *options, code=70)
    assert "the same fault came back at the same step 5" in printed
    assert printed.count("began at step 0") == 2
    assert "hint: fix the job" in printed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--run-id", "../x"], "not usable as a name"),
        (["--run-id", "a b"], "not usable as a name"),
        (["--run-id", "x" * 300], "at most 80"),
        ([], "a run needs a name"),
        (["nothing.toml"], "no such spec file"),
        (["--run-id", "a", "--set", "run.totl_steps=3"], "did you mean 'total_steps'"),
        (["--run-id", "a", "--set", "run.total_steps=many"], "must be of type int, not str"),
        (["--run-id", "a", "--set", "world"], "not FIELD=VALUE"),
        (["--run-id", "a"], "no store is given"),
        (["--run-id", "a", "--store", "http://x"], "cannot open store"),
        (["--run-id", "a", "--store", "s3://bucket/x"], "no credentials for the store"),
    ],
)
def test_mistakes_are_clear_before_anything_starts(tmp_path: Path, args: list[str], words: str) -> None:
    """Exit code 78 and one message with a hint; nothing is written."""
    printed = _call(tmp_path, "train", "--local", *args, code=78)
    assert words in printed
    assert len(printed) < 700
    assert not list(tmp_path.iterdir())


def test_stores_that_refuse_are_told_apart(tmp_path: Path, seaweed: SeaweedServer) -> None:
    """Wrong keys, a missing bucket, nobody there: three messages, none with a key in it."""
    good = seaweed.environ("cli")
    wrong = {**good, "TORCHRELAY_SECRET_KEY": "not-the-secret-key-at-all"}
    printed = _call(tmp_path, "runs", code=78, environ=wrong)
    assert "SignatureDoesNotMatch" in printed or "refused" in printed
    assert "not-the-secret" not in printed
    missing = {**good, "TORCHRELAY_STORE": "s3://no-such-bucket/x"}
    assert "no-such-bucket" in _call(tmp_path, "train", "--run-id", "a", "--local", *_TINY, code=78, environ=missing)
    away = {**good, "TORCHRELAY_S3_ENDPOINT": "http://127.0.0.1:9"}
    printed = _call(tmp_path, "runs", code=75, environ=away)
    assert "did not answer" in printed
    assert "torchrelay up" in printed
    assert _call(tmp_path, "runs", environ=good).startswith("no runs in")


def test_a_server_that_is_not_there_is_named_with_the_way_out(tmp_path: Path, trained: str) -> None:
    """No address, and an address where nobody listens."""
    printed = _call(tmp_path, "train", "--run-id", "a", "--store", trained, code=78)
    assert "no Prefect server is named" in printed
    assert "--local" in printed
    printed = _call(
        tmp_path,
        "train",
        "--run-id",
        "a",
        "--store",
        trained,
        code=75,
        environ={"PREFECT_API_URL": "http://127.0.0.1:9/api"},
    )
    assert "no Prefect server answers" in printed


def test_the_environment_beats_the_file_as_one_group(tmp_path: Path) -> None:
    """An address of one store never meets the keys of another; a file further up is found."""
    home = tmp_path / ".torchrelay"
    home.mkdir()
    (home / "env").write_text(
        "# note\nTORCHRELAY_STORE=s3://a/b\nTORCHRELAY_ACCESS_KEY=k\nPREFECT_API_URL=http://x/api\n"
    )
    base = {"TORCHRELAY_HOME": str(home)}
    assert settings(base)["TORCHRELAY_STORE"] == "s3://a/b"
    own = settings({**base, "TORCHRELAY_STORE": "s3://other/x"})
    assert own["TORCHRELAY_STORE"] == "s3://other/x"
    assert "TORCHRELAY_ACCESS_KEY" not in own
    assert own["PREFECT_API_URL"] == "http://x/api"
    assert settings({**base, "PREFECT_API_URL": "http://y/api"})["TORCHRELAY_STORE"] == "s3://a/b"
    assert read_env_file(tmp_path / "none") == {}
    (tmp_path / "deep/er").mkdir(parents=True)
    code = "from torchrelay.cli.console import find_home; print(find_home({}))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "deep/er", capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(home)
    assert find_home(base) == home


def test_a_prefect_server_must_be_named() -> None:
    """Never a private one, started in silence."""
    with pytest.raises(ConfigError, match="no Prefect server is named"):
        PrefectAPI({})


def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path, trained: str) -> None:
    """``torchrelay runs | head -0``: no traceback."""
    shell = f"{' '.join(_CLI)} checkpoints done --store {trained} | head -c 0; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], env=_environ(tmp_path), capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


def test_on_a_terminal_there_are_bars_and_tables(tmp_path: Path, trained: str) -> None:
    """A finished run in a pseudo-terminal: the bar is drawn, the table has a bold head, and nothing is cut to eighty columns elsewhere."""
    main, side = pty.openpty()
    environ = _environ(tmp_path, TERM="xterm-256color", COLUMNS="120")
    command = [*_CLI, "train", "--local", "--run-id", "done", "--store", trained, *_TINY, "--set", "run.total_steps=30"]
    command += ["--set", "run.options.sleep_s=0.01"]
    for args in (command, [*_CLI, "checkpoints", "done", "--store", trained]):
        subprocess.run(args, env=environ, stdin=side, stdout=side, stderr=side, check=True, timeout=60)
    os.close(side)
    shown = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(main)
    text = shown.decode()
    assert "30/30" in text
    assert "nothing was done" in text
    assert "\x1b[1m" in text
    assert "committed" in text


def test_commands_are_quick_and_load_neither_torch_nor_prefect() -> None:
    """The command line answers at once."""
    code = "import sys, torchrelay.cli as c; c._parser(); print([m for m in ('torch', 'prefect', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
