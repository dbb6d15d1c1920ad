"""Why a generation ended: pure functions on exit codes, failure reports and counters.

Of several ranks that failed within moments, most are victims of one. The culprit is chosen by kind (our own errors, then signals, then
exceptions that do not come from a collective), then by who failed first.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EXIT_FENCED", "EXIT_PREEMPTED", "Cause", "RankExit", "classify", "fingerprint"]

EXIT_PREEMPTED = 83
EXIT_FENCED = 73

_OWN_KINDS = {
    "fenced": "fenced",
    "run-busy": "conflict",
    "run-mismatch": "conflict",
    "conflict": "conflict",
    "config": "config",
    "job": "config",
    "state-mismatch": "config",
    "unserialisable": "config",
    "store-access": "config",
    "corruption": "corruption",
    "retryable": "store",
    "store-unavailable": "store",
    "storage-full": "store",
    "not-found": "store",
}
_MEMORY_ERRORS = frozenset({"MemoryError", "OutOfMemoryError"})
_LIBRARY = ("torch.", "torchrelay.segment", "torchrelay.worker", "torchrelay.state", "importlib", "runpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """End of one rank: ``code`` as subprocess gives it (negative = signal), seconds since the first end, its report if it left one.

    ``ours`` marks ranks that the launcher itself must kill: those say nothing, unless they have left a report and were only slow to end.
    """

    rank: int
    code: int
    after_s: float
    ours: bool = False
    step: int = 0
    reached_step: bool = False
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Kind, culprit and words of an end."""

    kind: str
    rank: int | None = None
    message: str = ""
    hint: str = ""
    fingerprint: str = ""


def classify(exits: Sequence[RankExit], *, oom_kills: int = 0) -> Cause:
    """Name the cause of the ends of all ranks. ``oom_kills`` is how often the kernel's memory killer struck in this cgroup meanwhile."""
    if exits and all(item.code in (0, EXIT_PREEMPTED) for item in exits):
        preempted = any(item.code == EXIT_PREEMPTED for item in exits)
        return Cause(kind="preempted" if preempted else "completed")
    failed = sorted(
        (item for item in exits if item.code not in (0, EXIT_PREEMPTED) and (item.report or not item.ours)),
        key=lambda item: (_rank_of_kind(item), item.after_s),
    )
    if not failed:
        return Cause(kind="killed", message="all ranks were ended by the launcher")
    return _describe(failed[0], oom_kills=oom_kills, started=any(item.reached_step for item in exits))


def fingerprint(report: Mapping[str, Any]) -> str:
    """Name an exception by its class and the innermost frame that is the user's own: stable over processes, hosts and edits of other lines."""
    frames = [str(frame) for frame in report.get("frames", ())]
    own = [frame for frame in frames if not frame.startswith(_LIBRARY)] or frames or ["?"]
    return f"{report.get('error', '?')}@{own[-1]}"


def _fell_silently(item: RankExit) -> bool:
    """Whether a signal ended it before it could say anything. One that reported and then fell while it ended is known by its report."""
    return item.code < 0 and not item.ours and not item.report


def _rank_of_kind(item: RankExit) -> int:
    if item.report.get("kind") in _OWN_KINDS or item.code == EXIT_FENCED:
        return 0
    if _fell_silently(item):
        return 1
    if item.report and not item.report.get("distributed"):
        return 2
    return 3 if not item.report else 4


def _describe(item: RankExit, *, oom_kills: int, started: bool) -> Cause:
    """Put one rank's end into words."""
    failure = "exception" if started else "startup"
    if _fell_silently(item):
        kind, text = "killed", f"rank {item.rank} was killed by {_signal_name(-item.code)} at step {item.step}"
        if -item.code == signal.SIGKILL and oom_kills:
            kind, text = "oom", f"rank {item.rank} was killed by the kernel because memory ran out"
        return Cause(kind=kind, rank=item.rank, message=text)
    report = item.report
    if not report:
        kind, text = failure, f"rank {item.rank} ended with exit code {item.code} and without a word"
        if item.code == EXIT_FENCED:
            kind, text = "fenced", "the launcher's pulse stopped; the ranks ended themselves"
        return Cause(kind=kind, rank=item.rank, message=text, fingerprint=f"exit-{item.code}")
    kind = _OWN_KINDS.get(str(report.get("kind"))) or ("oom" if report.get("error") in _MEMORY_ERRORS else failure)
    place = f"rank {item.rank}, phase {report.get('phase')}, step {report.get('step')}"
    text = f"{report.get('error')}: {report.get('message')} ({place})"
    return Cause(
        kind=kind, rank=item.rank, message=text, hint=str(report.get("hint", "")), fingerprint=fingerprint(report)
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
