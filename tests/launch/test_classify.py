"""Which rank is the cause, and what kind of end it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchrelay.launch.classify import EXIT_FENCED, RankExit, classify, fingerprint
from torchrelay.launch.processes import oom_kills


def _exit(rank: int, code: int, after_s: float = 0.0, **more: Any) -> RankExit:
    return RankExit(rank=rank, code=code, after_s=after_s, reached_step=more.pop("reached_step", True), **more)


def _report(error: str = "ValueError", **more: Any) -> dict[str, Any]:
    frames = ["torchrelay.worker:main", "job:loss", "torch.nn.functional:linear"]
    return {"error": error, "message": "bad batch", "frames": frames, "step": 7, "phase": "step", **more}


def test_all_zero_is_completed_and_83_is_preempted() -> None:
    """Clean ends."""
    assert classify([_exit(0, 0), _exit(1, 0)]).kind == "completed"
    assert classify([_exit(0, 83), _exit(1, 83)]).kind == "preempted"
    assert classify([_exit(0, 0), _exit(1, 83)]).kind == "preempted"


def test_a_killed_rank_is_the_cause_although_its_peers_failed_first() -> None:
    """Peers of a killed rank see a broken collective, sometimes before the launcher sees the kill."""
    victim = _exit(0, 1, 0.0, report=_report("RuntimeError", distributed=True))
    cause = classify([victim, _exit(1, -9, 0.1, step=7)])
    assert (cause.kind, cause.rank) == ("killed", 1)
    assert "SIGKILL at step 7" in cause.message


def test_an_exception_beats_its_victims_and_has_a_stable_fingerprint() -> None:
    """The rank that raised by itself is named, by class and the user's innermost frame."""
    victim = _exit(0, 1, 0.0, report=_report("DistNetworkError", distributed=True))
    cause = classify([victim, _exit(1, 1, 0.2, report=_report(distributed=False))])
    assert (cause.kind, cause.rank, cause.fingerprint) == ("exception", 1, "ValueError@job:loss")
    assert "bad batch" in cause.message


def test_a_report_outlives_a_crash_at_the_very_end() -> None:
    """A rank that has said why it fails, and is then aborted while its collectives are taken apart, is known by what it said."""
    cause = classify(
        [_exit(0, -6, 0.0, report=_report("RuntimeError", distributed=True)), _exit(1, -6, 0.1, report=_report())]
    )
    assert (cause.kind, cause.rank) == ("exception", 1)
    assert "bad batch" in cause.message


def test_before_the_first_step_an_exception_is_a_start_up_failure() -> None:
    """Nobody trained: it is not the data."""
    exits = [_exit(rank, 1, report=_report(phase="init"), reached_step=False) for rank in range(2)]
    assert classify(exits).kind == "startup"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("job", "config"),
        ("unserialisable", "config"),
        ("state-mismatch", "config"),
        ("corruption", "corruption"),
        ("fenced", "fenced"),
        ("store-unavailable", "store"),
    ],
)
def test_our_own_errors_keep_their_kind_and_hint(kind: str, expected: str) -> None:
    """What the user must change is not tried again; what another start can cure is."""
    cause = classify([_exit(0, 78, report=_report("E", kind=kind, hint="do this")), _exit(1, -9, 0.1)])
    assert (cause.kind, cause.hint) == (expected, "do this")


def test_running_out_of_memory_is_told_by_report_and_by_the_kernels_counter() -> None:
    """A SIGKILL alone is not called out-of-memory; the cgroup's counter makes it so."""
    assert classify([_exit(0, 1, report=_report("OutOfMemoryError"))]).kind == "oom"
    assert classify([_exit(0, 1, report=_report("MemoryError"))]).kind == "oom"
    assert classify([_exit(0, -9)], oom_kills=1).kind == "oom"
    assert classify([_exit(0, -9)], oom_kills=0).kind == "killed"


def test_a_rank_that_ended_itself_by_the_pulse_is_fenced() -> None:
    """The exit code of the pulse watch, without a report."""
    assert classify([_exit(0, EXIT_FENCED), _exit(1, EXIT_FENCED)]).kind == "fenced"


def test_ranks_killed_by_the_launcher_say_nothing() -> None:
    """Only the one that failed by itself counts, unless a report shows that it had failed and was only slow to end."""
    cause = classify([_exit(0, -9, 0.6, ours=True), _exit(1, 3, 0.0)])
    assert (cause.kind, cause.rank, cause.fingerprint) == ("exception", 1, "exit-3")
    slow = _exit(1, -9, 0.6, ours=True, report=_report("MemoryError"))
    assert classify([_exit(0, 1, report=_report("RuntimeError", distributed=True)), slow]).kind == "oom"


def test_fingerprints_ignore_library_frames_but_survive_without_others() -> None:
    """Two faults in one place are one fault."""
    assert fingerprint({"error": "E", "frames": ["torch.a:b"]}) == "E@torch.a:b"
    assert fingerprint({}) == "?@?"


@pytest.mark.parametrize(
    ("line", "folder", "name"),
    [("0::/box", "box", "memory.events"), ("4:memory:/box", "memory/box", "memory.oom_control")],
)
def test_the_kernels_counter_is_read_from_both_cgroup_versions(
    tmp_path: Path, line: str, folder: str, name: str
) -> None:
    """One number in a file whose place and name depend on the version."""
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / name).write_text("low 0\noom 3\noom_kill 2\n")
    own = tmp_path / "own"
    own.write_text(f"9:cpu:/other\n{line}\n")
    assert oom_kills(tmp_path, own) == 2
    assert oom_kills(tmp_path, tmp_path / "missing") == 0
