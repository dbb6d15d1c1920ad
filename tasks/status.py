"""Where a run stands, asked of the object store: the only source of truth, read off the event loop.

Prefect's states, caches and results are never consulted: a flow run may crash, be run again or be started twice, and the answer is the same.
"""

from __future__ import annotations

import asyncio

from torchrelay import relay
from torchrelay.config import TrainSpec
from torchrelay.relay import Position
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["open_run_store", "read_position"]


async def open_run_store(spec: TrainSpec) -> ObjectStore:
    """Open the store of a spec. Raises ConfigError if there is none."""
    return await asyncio.to_thread(open_store, spec.store)


async def read_position(store: ObjectStore, spec: TrainSpec) -> Position:
    """Read where the run stands. Raises RunMismatchError, naming the difference, if the run exists with another spec."""
    return await asyncio.to_thread(relay.read_position, store, spec)
