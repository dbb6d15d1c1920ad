"""The flow ``train``: one run, segment after segment, until its last step is committed.

Each round asks the object store where the run stands and trains the segment that follows. So a flow run that crashed, was cancelled or is started
again, by a person, a schedule or a second server, goes on where the last checkpoint is; a finished run says so at once.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from tasks.report import Reporter, RunPage
from tasks.segment import RelayRun, segment_task
from tasks.status import open_run_store, read_position
from torchrelay.config import TrainSpec
from torchrelay.errors import TorchrelayError
from torchrelay.relay import Position

__all__ = ["train"]

_LAST_REPORT_S = 10.0


@flow(
    name="train",
    flow_run_name="{spec.run.run_id}",
    description="Train a run to its last step, in segments that survive what kills them.",
    persist_result=False,
    retries=0,
)
async def train(spec: TrainSpec) -> State[Any]:
    """Train the run that ``spec`` describes, or go on with it.

    The flow run is Completed when the run's last step is committed, and Failed, with the timeline of the last generations in its message, when
    going on would repeat the same failure.
    """
    try:
        return await _relay(spec)
    except TorchrelayError as error:
        # A state instead of an exception: the message on the flow run's page is then for a reader, without a traceback around it.
        return Failed(message=str(error))


async def _relay(spec: TrainSpec) -> State[Any]:
    run_id = spec.run.run_id
    store = await open_run_store(spec)
    reporter = Reporter()
    flow_run = runtime.flow_run.id
    page = RunPage(store=store, run_id=run_id, flow_run_id=UUID(flow_run) if flow_run else None, reporter=reporter)
    run = RelayRun(spec, store, origin=f"flow-run/{flow_run}", page=page)
    segments = 0
    try:
        while (position := await read_position(store, spec)).plan is not None:
            await segment_task(position.plan)(run, position.plan)
            segments += 1
        page.refresh()
        return _finished(run_id, position, segments)
    finally:
        # In a thread: closing waits for the last reports, the event loop must not.
        if not await asyncio.to_thread(reporter.close, _LAST_REPORT_S) or reporter.failed or reporter.dropped:
            get_run_logger().warning(
                "the page of the run may be out of date: %d reports failed, %d were dropped",
                reporter.failed,
                reporter.dropped,
            )


def _finished(run_id: str, position: Position, segments: int) -> State[Any]:
    step = position.status.committed_step
    work = f"{segments} segments in this flow run" if segments else "it was finished before; nothing was done"
    return Completed(message=f"Run {run_id} is finished: step {step} is committed ({work}).")
