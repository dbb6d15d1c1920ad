"""One segment of a run as a Prefect task: the unit that is retried and shown.

The task starts the launcher as a child process and waits; no torch is loaded here and no call to the Prefect server is made while ranks train.
One task run is one segment; each of its retries is one attempt, that is one generation. Whether there is another one is decided by ``relay.judge``
on what the store says, so that a crash of this process forgets nothing.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.logging import get_run_logger
from prefect.tasks import Task

from tasks.report import RunPage
from tasks.status import read_position
from torchrelay.attempt import Attempt, Event, Judge, restored_line
from torchrelay.config import TrainSpec
from torchrelay.errors import RetryableError, StoppedError, TorchrelayError
from torchrelay.relay import Outcome, Retry, SegmentPlan, Stop
from torchrelay.store.base import ObjectStore

__all__ = ["RelayRun", "SegmentFaultError", "segment_task"]

_RETRIES = 1000  # of one segment: far beyond what ``judge`` allows
_LOG_EVERY_S = 15.0
_BURST, _LINES_PER_S = 50.0, 2.0

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


class SegmentFaultError(TorchrelayError):
    """An attempt ended early and another one is worth it, after ``delay_s``."""

    kind = "segment-fault"
    exit_code = 75

    def __init__(self, message: str, *, delay_s: float) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class RelayRun:
    """What the segments of one flow run share. Not a collection, so Prefect hands it to a task as it is."""

    def __init__(self, spec: TrainSpec, store: ObjectStore, *, origin: str, page: RunPage) -> None:
        self.spec, self.store, self.origin, self.page = spec, store, origin, page
        self.judge = Judge(spec=spec, origin=origin)
        self.fault = ""  # kind of the last attempt's end, if it was a fault


def segment_task(plan: SegmentPlan) -> Task[[RelayRun, SegmentPlan], Any]:
    """Return the task of one segment. Each has its own, because the delay before a retry is set on it."""
    return _run_segment.with_options(task_run_name=f"segment-{plan.index}")


async def _worth_a_retry(segment: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Prefect's question after a failed attempt. The answer was found by ``judge``; so was the delay, shown as AwaitingRetry."""
    fault = state.data
    if not isinstance(fault, SegmentFaultError):
        return False
    segment.retry_delay_seconds = [fault.delay_s]
    return True


@task(
    name="run_segment",
    retries=_RETRIES,
    retry_condition_fn=_worth_a_retry,
    cache_policy=NO_CACHE,
    persist_result=False,
    log_prints=False,
)
async def _run_segment(run: RelayRun, plan: SegmentPlan) -> dict[str, Any]:
    """Train the segment to its stop step, or raise: SegmentFaultError for another attempt, StoppedError when there is none."""
    logger = get_run_logger()
    try:
        position = await read_position(run.store, run.spec)
    except RetryableError as error:
        raise _verdict(run.judge.unrecorded(str(error)), str(error)) from None
    if position.status.committed_step >= plan.stop_step:
        return _result(plan, position.status.committed_step)
    watch = _Watch(logger, run.page)
    attempt = Attempt(
        spec=run.spec,
        stop_step=plan.stop_step,
        origin=run.origin,
        why=f"segment {plan.index}" + (f", again after: {run.fault}" if run.fault else ""),
        on_event=watch.event,
        on_log=watch.line,
    )
    outcome = await attempt.run()
    watch.finish()
    run.page.refresh()
    run.fault = "" if outcome.kind == "completed" else outcome.kind
    if outcome.kind == "completed":
        return _result(plan, outcome.committed_step)
    logger.warning("%s", _ending(outcome))
    raise await _judged(run, outcome)


class _Watch:
    """Turns the launcher's events into a few log lines, and asks for the page to be redrawn at each commit."""

    def __init__(self, logger: Logger, page: RunPage) -> None:
        self._logger, self._page = logger, page
        self._tokens, self._refilled = _BURST, time.monotonic()
        self._told = time.monotonic()
        self._left_out = 0

    def event(self, event: Event) -> None:
        """Handle one event of the launcher. Never blocks: the loggers and the page work in threads of their own."""
        match event.get("event"):
            case "generation":
                number, begin, ranks = event.get("generation"), event.get("begin_step"), event.get("world_size")
                self._say(logging.INFO, f"generation {number} begins at step {begin} on {ranks} ranks")
                self._page.refresh()
            case "restored":
                self._say(logging.INFO, restored_line(event))
            case "progress" if time.monotonic() - self._told >= _LOG_EVERY_S:
                self._told = time.monotonic()
                self._say(logging.INFO, f"step {event.get('step')}, loss {event.get('loss')}")
            case "saved" if event.get("state") == "committed":
                self._say(logging.INFO, f"checkpoint of step {event.get('step')} is committed")
                self._page.refresh()
            case "saved" if event.get("state") == "failed":
                self._say(logging.WARNING, f"save of step {event.get('step')} failed: {event.get('message')}")
            case "notice":
                self._say(logging.WARNING, str(event.get("message")))
            case "sample":
                self._say(logging.INFO, f"the model writes: {event.get('text')}")

    def line(self, line: str) -> None:
        """Pass on one line of the launcher's own log."""
        self._say(logging.INFO, line)

    def finish(self) -> None:
        """Say how much was left out."""
        if self._left_out:
            self._logger.info("%d log lines of the launcher were left out here", self._left_out)

    def _say(self, level: int, text: str) -> None:
        now = time.monotonic()
        self._tokens = min(_BURST, self._tokens + (now - self._refilled) * _LINES_PER_S)
        self._refilled = now
        if self._tokens < 1:
            self._left_out += 1
            return
        self._tokens -= 1
        self._logger.log(level, "%s", text[:2000])


async def _judged(run: RelayRun, outcome: Outcome) -> TorchrelayError:
    try:
        status = (await read_position(run.store, run.spec)).status
    except RetryableError:
        return _verdict(run.judge.unrecorded(outcome.message, outcome.hint), _ending(outcome))
    return _verdict(run.judge.decide(status, outcome), _ending(outcome))


def _verdict(decision: Retry | Stop, ending: str) -> TorchrelayError:
    if isinstance(decision, Retry):
        return SegmentFaultError(ending, delay_s=decision.delay_s)
    return StoppedError(decision.reason, hint=decision.hint)


def _ending(outcome: Outcome) -> str:
    return (
        f"generation {outcome.generation} ended at step {outcome.last_step} (committed: {outcome.committed_step}): "
        f"{outcome.kind}{' - ' + outcome.message if outcome.message else ''}"
    )


def _result(plan: SegmentPlan, committed_step: int) -> dict[str, Any]:
    return {"segment": plan.index, "committed_step": committed_step}
