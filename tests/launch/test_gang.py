"""A gang of small real programs: each end is classified, and no process is ever left behind."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from torchrelay.config import FaultSpec, RunSpec, TrainSpec, WorldSpec
from torchrelay.launch.classify import Cause
from torchrelay.launch.gang import Gang, GangCommands

_PRELUDE = """
import json, os, signal, struct, subprocess, sys, time
W, RANK = os.environ["TORCHRELAY_WORKDIR"], int(os.environ["RANK"])
def phase(number, step):
    with open(f"{W}/rank-{RANK}.progress", "r+b") as f:
        f.write(struct.pack("<3d", number, step, time.monotonic()))
def report(**body):
    with open(f"{W}/rank-{RANK}.failure.json", "w") as f:
        json.dump({"error": "ValueError", "message": "bad", "frames": ["job:loss"], "step": 3, "phase": "step", **body}, f)
def emit(**event):
    os.write(int(os.environ["TORCHRELAY_EVENTS_FD"]), json.dumps(event).encode() + b"\\n")
def until(path):
    while not os.path.exists(path): time.sleep(0.01)
"""
_COURIER = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True: time.sleep(60)
"""


class _Run:
    """Runs a gang in a thread and collects what happened."""

    def __init__(self, folder: Path, rank: str, *, courier: str = _COURIER, ranks: int = 2, **faults: Any) -> None:
        self.folder, self.events, self.cause = folder, list[dict[str, Any]](), list[Cause]()
        self.stop, self.reason = threading.Event(), list[str]()
        spec = TrainSpec(
            run=RunSpec(run_id="g"),
            world=WorldSpec(ranks=ranks),
            faults=FaultSpec(**{"drain_s": 5.0, "grace_s": 5.0, **faults}),
        )
        self.gang = Gang(
            spec=spec,
            generation=1,
            folder=folder,
            on_event=self.events.append,
            tick=lambda: self.reason[0] if self.reason else None,
            stop_requested=self.stop.is_set,
            commands=GangCommands(rank=_program(rank), courier=_program(courier)),
        )
        self.thread = threading.Thread(target=lambda: self.cause.append(self.gang.run()))
        self.thread.start()

    def pids(self, role: str) -> list[int]:
        return [event["pid"] for event in self.events if event.get("event") == "process" and event["role"] == role]

    def end(self, timeout_s: float = 30.0) -> Cause:
        """Wait for the end; check that every process and every process group is gone."""
        self.thread.join(timeout_s)
        assert not self.thread.is_alive()
        for pid in self.pids("rank") + self.pids("courier"):
            wait_until(partial(_group_gone, pid), what=f"the end of group {pid}")
        return self.cause[0]


def _program(body: str) -> list[str]:
    return [sys.executable, "-c", _PRELUDE + textwrap.dedent(body)]


def _group_gone(pid: int) -> bool:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == pid and fields[0] not in ("Z", "X"):
                return False
    return True


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_ranks_that_finish_are_completed_and_couriers_are_dismissed(tmp_path: Path) -> None:
    """The plain case, with events passed on."""
    run = _Run(tmp_path, "phase(2, 5); emit(event='progress', step=5)")
    assert run.end().kind == "completed"
    assert run.gang.last_step == 5
    assert {"event": "progress", "step": 5} in run.events
    assert run.gang.first_step_s is not None


def test_a_rank_killed_by_a_signal_takes_the_gang_with_it(tmp_path: Path) -> None:
    """The killed rank is named; the peer that hangs on is killed."""
    run = _Run(tmp_path, "phase(2, 4)\nif RANK == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
    cause = run.end()
    assert (cause.kind, cause.rank) == ("killed", 1)


def test_an_exception_is_read_from_the_report(tmp_path: Path) -> None:
    """The culprit's report wins over its victim's."""
    run = _Run(tmp_path, "phase(2, 3)\nreport(distributed=RANK == 0)\nsys.exit(1)")
    cause = run.end()
    assert (cause.kind, cause.rank, cause.fingerprint) == ("exception", 1, "ValueError@job:loss")


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    """Grandchildren of a failed rank (loader workers, servers) are killed with the group."""
    body = "phase(2, 1)\np = subprocess.Popen(['sleep', '600'])\nopen(f'{W}/child-{RANK}', 'w').write(str(p.pid))\nsys.exit(3)"
    run = _Run(tmp_path, body)
    assert run.end().fingerprint == "exit-3"
    for rank in range(2):
        pid = int((tmp_path / f"child-{rank}").read_text())
        wait_until(partial(_gone, pid))


def test_a_slow_start_says_who_is_where(tmp_path: Path) -> None:
    """The limit from launch to the first step."""
    run = _Run(tmp_path, "phase(RANK, 0); time.sleep(600)", start_timeout_s=1.0)
    cause = run.end()
    assert cause.kind == "startup"
    assert "rank 0 in phase init, rank 1 in phase load" in cause.message


def test_a_request_to_stop_is_passed_on_and_waited_for(tmp_path: Path) -> None:
    """SIGTERM to every rank; 83 means saved and committed."""
    run = _Run(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(83)); phase(2, 6); time.sleep(600)")
    wait_until(lambda: run.gang.first_step_s is not None)
    run.stop.set()
    assert run.end().kind == "preempted"


def test_a_rank_that_will_not_stop_is_killed_after_the_grace(tmp_path: Path) -> None:
    """Politeness ends."""
    run = _Run(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); phase(2, 6); time.sleep(600)", grace_s=0.5)
    wait_until(lambda: run.gang.first_step_s is not None)
    run.stop.set()
    cause = run.end()
    assert cause.kind == "preempted"
    assert "not committed within the grace" in cause.message


def test_a_stopped_rank_gets_no_grace(tmp_path: Path) -> None:
    """A process in SIGSTOP cannot answer; waiting for it would be waiting for nothing."""
    run = _Run(
        tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(83)); phase(2, 6); time.sleep(600)", grace_s=600.0
    )
    wait_until(lambda: run.gang.first_step_s is not None)
    os.kill(run.pids("rank")[0], signal.SIGSTOP)
    began = time.monotonic()
    run.stop.set()
    run.end()
    assert time.monotonic() - began < 60


def test_a_request_before_ranks_can_listen_is_no_failure(tmp_path: Path) -> None:
    """SIGTERM kills a rank that is still starting; nothing is lost by that."""
    run = _Run(tmp_path, "open(f'{W}/up-{RANK}', 'w').close(); time.sleep(600)")
    wait_until(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists())
    run.stop.set()
    assert run.end().kind == "preempted"


def test_a_reason_to_end_kills_at_once(tmp_path: Path) -> None:
    """A newer generation leaves no time for politeness."""
    run = _Run(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); phase(2, 6); time.sleep(600)", grace_s=600.0)
    wait_until(lambda: run.gang.first_step_s is not None)
    run.reason.append("succeeded by generation 2")
    assert run.end().kind == "fenced"


def test_a_dead_courier_is_started_again_while_its_rank_lives(tmp_path: Path) -> None:
    """And noticed, and the rank is not disturbed."""
    run = _Run(tmp_path, "phase(2, 1); until(f'{W}/go'); phase(2, 2)", ranks=1)
    wait_until(lambda: run.gang.first_step_s is not None)
    os.kill(run.pids("courier")[0], signal.SIGKILL)
    wait_until(lambda: len(run.pids("courier")) == 2)
    (tmp_path / "go").touch()
    assert run.end().kind == "completed"
    assert any("courier 0 ended with -9" in event.get("message", "") for event in run.events)


def test_a_courier_that_dies_for_ever_ends_the_generation(tmp_path: Path) -> None:
    """Training without saving is not training."""
    run = _Run(tmp_path, "phase(2, 1); time.sleep(600)", courier="sys.exit(7)", ranks=1)
    cause = run.end()
    assert (cause.kind, cause.fingerprint) == ("exception", "courier")


def test_couriers_get_time_to_finish_and_no_more(tmp_path: Path) -> None:
    """A courier that has something staged may go on after its rank; one that hangs is killed."""
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'{W}/deaf', 'w').close()\n"
    late = deaf + "until(f'{W}/done')\nopen(f'{W}/late-{RANK}', 'w').close()"
    rank = "phase(2, 1)\nuntil(f'{W}/deaf')\nopen(f'{W}/done', 'w').close()\nos.kill(os.getpid(), signal.SIGKILL)"
    assert _Run(tmp_path, rank, courier=late, ranks=1).end().kind == "killed"
    assert (tmp_path / "late-0").exists()
    (tmp_path / "second").mkdir()
    hanging = _Run(
        tmp_path / "second", "phase(2, 1)\nuntil(f'{W}/deaf')", courier=deaf + "time.sleep(600)", ranks=1, drain_s=0.5
    )
    assert hanging.end().kind == "completed"


def test_each_gang_meets_at_a_fresh_port(tmp_path: Path) -> None:
    """No rank can reach an earlier generation's rendezvous."""
    ports = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        _Run(tmp_path / name, "open(f'{W}/port', 'w').write(os.environ['MASTER_PORT']); phase(2, 1)", ranks=1).end()
        ports.append(int((tmp_path / name / "port").read_text()))
    assert ports[0] != ports[1]
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < low for port in ports)


@pytest.mark.parametrize("code", [0, 83])
def test_half_finished_gangs_do_not_hang(tmp_path: Path, code: int) -> None:
    """One rank ends well, the other is killed: the kill is the cause."""
    run = _Run(tmp_path, f"phase(2, 1)\nif RANK == 0: sys.exit({code})\nos.kill(os.getpid(), signal.SIGKILL)")
    assert run.end().kind == "killed"
