"""A real launcher with real ranks, couriers and a store: what a parent sees, and what is in the store afterwards."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launching import Launch, final_state, renamed, tiny_spec, train_to_the_end
from tests.waiting import wait_until
from torchrelay.checkpoint.generation import read_lease
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.reader import loss_trace
from torchrelay.relay import read_status
from torchrelay.store import open_store
from torchrelay.testing.tiny import fail_at


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A local folder as the store."""
    return f"file://{tmp_path / 'store'}"


def test_a_run_completes_and_says_so(store: str) -> None:
    """Events, outcome, lease and history of a run that nothing disturbs; launching it again changes nothing."""
    spec = tiny_spec(store, "plain", ranks=2)
    launch = Launch(spec)
    outcome = launch.outcome()
    assert (outcome.kind, outcome.last_step, outcome.committed_step) == ("completed", 30, 30)
    assert {event["event"] for event in launch.events} >= {
        "generation",
        "process",
        "saved",
        "progress",
        "sample",
        "outcome",
    }
    assert outcome.stats["commits"] == 3
    assert outcome.stats["stall_s_max"] > 0
    assert launch.all_gone()
    opened = open_store(store)
    assert [ref.step for ref in read_history(opened, "plain").line] == [10, 20, 30]
    lease = read_lease(opened, "plain", 1)
    assert lease is not None
    assert lease.ended
    assert not Path(launch.events[0]["workdir"]).exists()
    again = Launch(spec).outcome()
    assert (again.kind, again.begin_step, again.committed_step) == ("completed", 30, 30)


def test_sigterm_saves_commits_and_exits_clean(store: str) -> None:
    """The step that was reached is committed, between two intervals, and the run goes on from there."""
    spec = tiny_spec(store, "term", ranks=2, steps=400, interval=100, sleep_s=0.02)
    launch = Launch(spec)
    launch.wait_for(lambda event: event["event"] == "progress" and event["step"] > 3)
    launch.process.send_signal(signal.SIGTERM)
    outcome = launch.outcome()
    assert outcome.kind == "preempted"
    assert 3 < outcome.committed_step == outcome.last_step < 400
    assert launch.process.returncode == 0
    assert launch.all_gone()


def test_saves_that_are_never_committed_leave_no_gap_in_the_curve(store: str) -> None:
    """Manifests cannot be written for a while: checkpoints are overtaken by newer ones, and what they held is in the next one, losses included."""
    spec = tiny_spec(store, "gap", ranks=2, steps=120, sleep_s=0.02)
    launch = Launch(spec)
    launch.wait_committed(10)
    folder = Path(store.removeprefix("file://")) / "runs/gap/manifests"
    folder.rename(folder.with_name("aside"))
    folder.touch()
    launch.wait_for(
        lambda event: event["event"] == "saved" and event["state"] == "written" and event["step"] >= 30,
        what="two saves that are not committed",
    )
    folder.unlink()
    folder.with_name("aside").rename(folder)
    assert launch.outcome().kind == "completed"
    assert [step for step, _ in loss_trace(open_store(store), "gap")] == list(range(1, 121))
    train_to_the_end(renamed(spec, "twin", **spec.run.options))
    assert final_state(store, "gap") == final_state(store, "twin")


def test_a_parent_that_is_gone_is_noticed(store: str) -> None:
    """The end of stdin is a request to stop: nothing trains on for nobody."""
    launch = Launch(tiny_spec(store, "orphan", steps=4000, interval=1000, sleep_s=0.02))
    launch.wait_for(lambda event: event["event"] == "progress" and event["step"] > 3)
    assert launch.process.stdin is not None
    launch.process.stdin.close()
    outcome = launch.outcome()
    assert outcome.kind == "preempted"
    assert outcome.committed_step == outcome.last_step > 3


def test_a_second_start_of_a_live_run_is_refused(store: str) -> None:
    """One of two wins; the other says who has it and leaves it alone."""
    spec = tiny_spec(store, "twice", steps=4000, interval=1000, sleep_s=0.02)
    first = Launch(spec)
    first.wait_for(lambda event: event["event"] == "progress")
    second = Launch(spec).outcome()
    assert second.kind == "conflict"
    assert "being trained by generation 1" in second.message
    first.process.send_signal(signal.SIGTERM)
    assert first.outcome().kind == "preempted"


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise", "exception", "a bad batch, as ordered"),
        ("memory", "oom", "no memory"),
        ("exit", "exception", "exit code 7"),
        ("kill", "killed", "SIGKILL"),
    ],
)
def test_how_a_rank_failed_is_told(store: str, how: str, kind: str, words: str) -> None:
    """Each way to fail has its name, its rank and its step; the next start goes on."""
    flag = Path(store.removeprefix("file://")).parent / "flag"
    spec = tiny_spec(store, "fails", ranks=2, fail_at=fail_at(1, 13, how=how, flag=flag))
    launch = Launch(spec)
    outcome = launch.outcome()
    assert (outcome.kind, outcome.rank, outcome.committed_step) == (kind, 1, 10)
    assert words in outcome.message
    assert launch.all_gone()
    assert Launch(spec).outcome().kind == "completed"


def test_a_job_that_cannot_be_built_is_a_matter_for_its_author(store: str) -> None:
    """Not tried again; the message is the job's own, with a hint."""
    for number, (job, words) in enumerate(
        [
            ("torchrelay.testing.tiny:biuld", "build"),
            ("no_such_package:build", "no_such_package"),
            ("missing/file.py:f", "missing/file.py"),
        ]
    ):
        spec = tiny_spec(store, f"nojob-{number}")
        outcome = Launch(replace(spec, run=replace(spec.run, job=job))).outcome()
        assert outcome.kind == "config"
        assert words in outcome.message + outcome.hint


def test_state_that_cannot_be_stored_is_named(store: str) -> None:
    """Refused at the first save, with its path."""
    outcome = Launch(tiny_spec(store, "odd", odd=True)).outcome()
    assert outcome.kind == "config"
    assert "odd.open" in outcome.message


def test_another_spec_under_the_same_name_is_refused(store: str) -> None:
    """The difference is spelled out."""
    Launch(tiny_spec(store, "same", steps=10)).outcome()
    outcome = Launch(tiny_spec(store, "same", steps=20)).outcome()
    assert outcome.kind == "conflict"
    assert "total_steps: the run has 10, this spec has 20" in outcome.message


@pytest.mark.parametrize("where", ["step", "save", "load"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_in_step_in_save_in_load_and_still_bit_for_bit(store: str, ranks: int, where: str) -> None:
    """Dropout, schedule, EMA, loader workers, augmentation: the broken run ends equal to the unbroken one, in every byte and every loss."""
    flag = Path(store.removeprefix("file://")).parent / f"flag-{where}-{ranks}"
    whole = tiny_spec(store, "whole", ranks=ranks, workers=1)
    train_to_the_end(whole)
    if where == "load":
        first = renamed(whole, "broken", fail_at=fail_at(ranks - 1, 0, where="load", flag=flag), sleep_s=0.01)
        launch = Launch(first)
        launch.wait_committed(10)
        os.kill(launch.pids("rank")[0], signal.SIGKILL)
        launch.outcome()
    else:
        step = 17 if where == "step" else 20
        first = renamed(whole, "broken", fail_at=fail_at(ranks - 1, step, where=where, flag=flag))
    outcomes = train_to_the_end(first)
    assert flag.exists()
    assert [outcome.kind for outcome in outcomes] == ["killed", "completed"]
    assert final_state(store, "broken") == final_state(store, "whole")
    assert read_status(open_store(store), "broken").committed_step == 30


def test_uneven_ranks_share_the_batch_by_weight(store: str) -> None:
    """Five ranks on a batch of twelve: nobody's samples count twice, and the data order is that of one rank."""
    for name, ranks in (("one", 1), ("five", 5)):
        train_to_the_end(tiny_spec(store, name, ranks=ranks, steps=6, interval=3, dropout=0.0))
    assert final_state(store, "one")[3]["ledger"] == final_state(store, "five")[3]["ledger"]
    one, five = (dict(final_state(store, name)[1]) for name in ("one", "five"))
    assert abs(one[1] - five[1]) < 1e-6  # the first loss: same weights, same samples, and dropout is off


def test_all_processes_die_with_a_killed_launcher(store: str) -> None:
    """SIGKILL of the launcher: ranks by the kernel's hand, couriers when they have finished; the next start waits for nobody."""
    spec = tiny_spec(store, "headless", ranks=2, steps=4000, interval=10, sleep_s=0.02)
    launch = Launch(spec)
    launch.wait_committed(10)
    launch.kill()
    wait_until(launch.all_gone, timeout_s=30, what="the end of all processes")
    committed = read_status(open_store(store), "headless").committed_step
    assert committed >= 10
    following = Launch(spec)
    event = following.wait_for(lambda event: event["event"] == "generation")
    assert event["begin_step"] == committed
    following.process.send_signal(signal.SIGTERM)
    following.outcome()
