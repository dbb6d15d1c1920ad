"""The care of one run's checkpoints as one Prefect task: verify what is kept, forget what is superseded, sweep what counts for nobody."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefect import task
from prefect.logging import get_run_logger

from torchrelay.checkpoint.retention import plan_retention
from torchrelay.checkpoint.survey import take_survey
from torchrelay.checkpoint.sweep import plan_sweep, sweep
from torchrelay.config import UpkeepSpec
from torchrelay.errors import TorchrelayError
from torchrelay.store import open_store
from torchrelay.upkeep import forget_superseded, policy_of, verify_unverified

__all__ = ["Tended", "tend_run", "upkeep_page"]


@dataclass(kw_only=True, slots=True)
class Tended:
    """What one round did for one run. ``problems`` are for a person: damage that was found, or what kept a step from being taken."""

    run_id: str
    verified: int = 0
    kept: int = 0
    forgotten: int = 0
    deleted: int = 0
    freed_bytes: int = 0
    live_bytes: int = 0
    unknown: int = 0
    problems: list[str] = field(default_factory=list)


@task(name="tend", task_run_name="{run_id}", persist_result=False)
def tend_run(spec: UpkeepSpec, run_id: str) -> Tended:
    """Verify, forget, sweep. A problem with one step is noted and the next one is tried; StoreUnavailableError and the like end the task."""
    store, log = open_store(spec.store), get_run_logger()
    done = Tended(run_id=run_id)
    policy = policy_of(store, run_id, spec.keep)
    for result in verify_unverified(store, run_id, policy, limit=spec.verify_at_most):
        if result.problem:
            done.problems.append(f"step {result.ref.step} is damaged and marked: {result.problem}")
        else:
            done.verified += 1
            log.info("step %d is whole (%.1f MiB)", result.ref.step, result.size_bytes / 2**20)
    choices = plan_retention(store, run_id, policy)
    done.forgotten = sum(choice.forget for choice in choices)
    if not spec.dry_run:
        done.forgotten = len(forget_superseded(store, run_id, choices))
    done.kept = len(choices) - done.forgotten
    survey = take_survey(store, run_id)
    done.problems += [f"{key} is missing" for key in survey.missing]
    done.unknown = len(list(survey.of("unknown")))
    done.live_bytes = sum(finding.info.size_bytes for finding in survey.of("live"))
    try:
        plan = plan_sweep(survey, grace_s=3600 * spec.grace_hours)
    except TorchrelayError as error:
        done.problems.append(str(error))
    else:
        done.deleted, done.freed_bytes = len(plan.findings), plan.size_bytes
        if not spec.dry_run:
            sweep(store, plan)
    for problem in done.problems:
        log.warning("run %s: %s", run_id, problem)
    return done


def upkeep_page(rows: list[Tended], *, dry_run: bool) -> str:
    """Markdown for the artifact of a round."""
    would = "would be " if dry_run else ""
    lines = [
        f"| run | verified | kept | {would}forgotten | objects {would}deleted | MiB {would}freed | MiB live | unknown objects |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for row in rows:
        cells = [row.run_id, row.verified, row.kept, row.forgotten, row.deleted]
        sizes = [f"{row.freed_bytes / 2**20:.1f}", f"{row.live_bytes / 2**20:.1f}", row.unknown]
        lines.append("| " + " | ".join(map(str, [*cells, *sizes])) + " |")
    problems = [f"- **{row.run_id}**: {problem}" for row in rows for problem in row.problems]
    return "\n".join([*lines, *(["", "## Problems", "", *problems] if problems else [])])
