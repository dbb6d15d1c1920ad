"""What happens next in a run: pure decisions on what the store says, shared by the Prefect flow and the command line.

A segment is planned from the newest committed step alone, so whoever asks, on whatever machine, gets the same answer. After a generation has
ended, ``judge`` decides between another one and a stop; its budgets are refilled only by a new best committed step, never by time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torchrelay.checkpoint.generation import open_run, read_lease, read_run
from torchrelay.checkpoint.history import Generation, History, read_history
from torchrelay.checkpoint.layout import generation_key, generations_prefix, parse_generation_key
from torchrelay.config import TrainSpec
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.base import ObjectStore

__all__ = [
    "FINAL_KINDS",
    "FREE_KINDS",
    "GenerationSummary",
    "Outcome",
    "Position",
    "Retry",
    "RunStatus",
    "SegmentPlan",
    "Stop",
    "judge",
    "plan_segment",
    "read_position",
    "read_status",
]

_RECENT = 12  # generations that a status reads in full; budgets look at fewer

FINAL_KINDS = frozenset({"config", "conflict"})
"""Ends that another try cannot change."""

FREE_KINDS = frozenset({"completed", "preempted"})
"""Ends that are no failure and use up no budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a generation ended.

    ``kind`` is one of completed, preempted, killed, oom, exception, startup, hang, corruption, fenced, conflict, config, store. ``fingerprint``
    names an exception by class and place. ``last_step`` is the highest step any rank finished, ``committed_step`` the newest checkpoint on the line.
    """

    kind: str
    generation: int
    begin_step: int
    last_step: int
    committed_step: int
    message: str = ""
    hint: str = ""
    fingerprint: str = ""
    rank: int | None = None
    stats: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Outcome:
        """Read what ``to_dict`` wrote; unknown fields are ignored."""
        return cls(**{name: body[name] for name in cls.__dataclass_fields__ if name in body})


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSummary:
    """One line of a run's timeline. ``outcome`` is None while it runs, and when its launcher died without a word."""

    number: int
    begin_step: int
    host: str
    origin: str
    why: str
    started_s: float
    outcome: Outcome | None

    def line(self) -> str:
        """One readable line."""
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.started_s))
        if self.outcome is None:
            ending = "ended without a word (its launcher died), or still running"
        else:
            reached = f"reached step {self.outcome.last_step}, committed step {self.outcome.committed_step}"
            first = self.outcome.message.splitlines()[0][:200] if self.outcome.message else ""
            ending = f"{reached}: {self.outcome.kind}{' - ' + first if first else ''}"
        return f"generation {self.number} ({started} UTC, {self.host}) began at step {self.begin_step}, {ending}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What the store says about a run; ``generations`` are the recent ones, newest last."""

    exists: bool
    committed_step: int
    manifest_key: str | None
    total_steps: int | None
    generations: tuple[GenerationSummary, ...]

    @property
    def finished(self) -> bool:
        """All steps are committed."""
        return self.total_steps is not None and self.committed_step >= self.total_steps


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Segment ``index`` (from 1): steps ``first_step`` (done already) up to ``stop_step``."""

    index: int
    first_step: int
    stop_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a run stands, and the segment that follows from it; no plan means that the run is finished."""

    status: RunStatus
    plan: SegmentPlan | None


@dataclass(frozen=True, slots=True)
class Retry:
    """Start another generation after this delay."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Do not go on; ``reason`` is for a person and holds the timeline. ``kind`` is final, deterministic, startup or no-progress."""

    kind: str
    reason: str
    hint: str = ""


def read_status(store: ObjectStore, run_id: str) -> RunStatus:
    """Read where a run stands. A run that does not exist has no steps."""
    try:
        total = int(read_run(store, run_id)["spec"]["total_steps"])
    except NotFoundError:
        return RunStatus(exists=False, committed_step=0, manifest_key=None, total_steps=None, generations=())
    history = read_history(store, run_id)
    latest = history.latest
    return RunStatus(
        exists=True,
        committed_step=latest.step if latest else 0,
        manifest_key=latest.key(run_id) if latest else None,
        total_steps=total,
        generations=_summaries(store, run_id, history),
    )


def read_position(store: ObjectStore, spec: TrainSpec) -> Position:
    """Read where the run of ``spec`` stands. Raises RunMismatchError, naming the difference, if the run exists with another spec."""
    status = read_status(store, spec.run.run_id)
    if status.exists:
        open_run(store, spec.run, provenance={})  # only compares: the run is there
    return Position(status=status, plan=plan_segment(spec, status.committed_step))


def plan_segment(spec: TrainSpec, committed_step: int) -> SegmentPlan | None:
    """Return the segment that contains the step after ``committed_step``; None when the run is finished."""
    if committed_step >= spec.run.total_steps:
        return None
    index = committed_step // spec.segment_steps + 1
    return SegmentPlan(index, committed_step, min(index * spec.segment_steps, spec.run.total_steps))


def judge(spec: TrainSpec, generations: Sequence[GenerationSummary], outcome: Outcome, *, origin: str) -> Retry | Stop:
    """Decide what follows ``outcome``, the end of the newest of ``generations``.

    Only generations started by ``origin`` (one flow run, one command) count, so that a person who starts the run again starts with a full budget.
    Those since the last new best committed step are idle. FAILURES F1 (budget), F2 (same fault at the same step), F3 (start-up), F28 (no progress).
    """
    own = [item for item in generations if item.origin == origin]
    timeline = "\n".join(f"  {item.line()}" for item in own[-_RECENT:])
    if outcome.kind in FINAL_KINDS:
        return Stop("final", outcome.message, outcome.hint)
    # Another committed step than it began at: a later one is progress; an earlier one means that the checkpoint it began at was damaged and is
    # marked now, so that the next generation begins earlier. That ends with the checkpoints.
    if outcome.kind in FREE_KINDS or outcome.committed_step != outcome.begin_step:
        return Retry(spec.faults.retry_delay_s if outcome.kind not in FREE_KINDS else 0.0)
    idle = _idle(own, outcome)
    same = [
        past
        for past in idle
        if past.fingerprint and past.fingerprint == outcome.fingerprint and past.last_step == outcome.last_step
    ]
    if outcome.kind == "exception" and len(same) >= 2:
        return Stop(
            "deterministic",
            f"the same fault came back at the same step {outcome.last_step + 1}: {outcome.message}\n{timeline}",
            "fix the job, then start the run again: it continues from its last checkpoint",
        )
    if outcome.kind in ("startup", "exception") and outcome.last_step <= outcome.begin_step and len(idle) >= 2:
        return Stop("startup", f"the run cannot reach its first step: {outcome.message}\n{timeline}", outcome.hint)
    if len(idle) >= spec.faults.max_idle_generations:
        return Stop(
            "no-progress",
            f"no progress: {len(idle)} generations in a row committed nothing new beyond step {outcome.committed_step}; "
            f"last: {outcome.message}\n{timeline}",
            "see the timeline; start the run again when the cause is gone",
        )
    return Retry(min(60.0, spec.faults.retry_delay_s * 2 ** (len(idle) - 1)))


def _idle(own: Sequence[GenerationSummary], outcome: Outcome) -> list[Outcome]:
    """Return the outcomes since the last new best step, ``outcome`` (which may not be in the store) included."""
    idle = [outcome]
    for item in reversed(own):
        if item.number == outcome.generation:
            continue
        past = item.outcome
        if past is None:
            past = Outcome(
                kind="killed",
                generation=item.number,
                begin_step=item.begin_step,
                last_step=0,
                committed_step=item.begin_step,
            )
        if past.kind in FREE_KINDS:
            continue
        if item.begin_step < outcome.begin_step or past.committed_step > past.begin_step:
            break
        idle.append(past)
    return idle


def _summaries(store: ObjectStore, run_id: str, history: History) -> tuple[GenerationSummary, ...]:
    names = [
        name for item in store.list(generations_prefix(run_id)).objects if (name := parse_generation_key(item.key))
    ]
    first = {name.number: name for name in sorted(names, reverse=True)}
    rows = []
    for number in sorted(first)[-_RECENT:]:
        key = generation_key(run_id, number, first[number].token)
        try:
            record = Generation.from_bytes(store.get(key), where=key)
        except (CorruptionError, NotFoundError):
            continue
        lease = read_lease(store, run_id, number)
        info = record.info
        rows.append(
            GenerationSummary(
                number=number,
                begin_step=record.begin_step,
                host=str(info.get("host", "?")),
                origin=str(info.get("origin", "")),
                why=str(info.get("why", "")),
                started_s=float(info.get("started_s", 0.0)),
                outcome=Outcome.from_dict(lease.outcome) if lease and lease.outcome else None,
            )
        )
    return tuple(rows)
