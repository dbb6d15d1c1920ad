"""Where a run stands, asked of the object store: the only source of truth, read off the event loop.

Prefect's states, caches and results are never consulted: a flow run may crash, be run again or be started twice, and the answer is the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from torchrelay.checkpoint.generation import open_run
from torchrelay.config import TrainSpec
from torchrelay.relay import RunStatus, SegmentPlan, plan_segment, read_status
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["Position", "open_run_store", "read_position"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """What the store says, and the segment that follows from it; no plan means that the run is finished."""

    status: RunStatus
    plan: SegmentPlan | None


async def open_run_store(spec: TrainSpec) -> ObjectStore:
    """Open the store of a spec. Raises ConfigError if there is none."""
    return await asyncio.to_thread(open_store, spec.store)


async def read_position(store: ObjectStore, spec: TrainSpec) -> Position:
    """Read where the run stands. Raises RunMismatchError, naming the difference, if the run exists with another spec."""
    return await asyncio.to_thread(_read, store, spec)


def _read(store: ObjectStore, spec: TrainSpec) -> Position:
    status = read_status(store, spec.run.run_id)
    if status.exists:
        open_run(store, spec.run, provenance={})  # only compares: the run is there
    return Position(status=status, plan=plan_segment(spec, status.committed_step))
