"""Fault-tolerant PyTorch training as a relay of retriable segments.

Importing this package does nothing: the public names below are resolved when they are first used, so that the orchestrator
never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrelay.config import FaultSpec, RunSpec, SaveSpec, TrainSpec, WorldSpec, load_spec
    from torchrelay.data.dataset import DatasetVersion
    from torchrelay.data.loader import elastic_loader, sample_generator
    from torchrelay.data.sampler import ElasticSampler
    from torchrelay.jobs.job import Job, JobContext
    from torchrelay.state.capture import TrainingState
    from torchrelay.state.checkpointer import Checkpointer, PendingCheckpoint, Restored
    from torchrelay.state.dcp import RelayReader, RelayWriter
    from torchrelay.store import open_store
    from torchrelay.store.base import ObjectStore

_HOMES = {
    "Checkpointer": "torchrelay.state.checkpointer",
    "DatasetVersion": "torchrelay.data.dataset",
    "ElasticSampler": "torchrelay.data.sampler",
    "FaultSpec": "torchrelay.config",
    "Job": "torchrelay.jobs.job",
    "JobContext": "torchrelay.jobs.job",
    "ObjectStore": "torchrelay.store.base",
    "PendingCheckpoint": "torchrelay.state.checkpointer",
    "RelayReader": "torchrelay.state.dcp_reader",
    "RelayWriter": "torchrelay.state.dcp",
    "Restored": "torchrelay.state.checkpointer",
    "RunSpec": "torchrelay.config",
    "SaveSpec": "torchrelay.config",
    "TrainSpec": "torchrelay.config",
    "TrainingState": "torchrelay.state.capture",
    "WorldSpec": "torchrelay.config",
    "elastic_loader": "torchrelay.data.loader",
    "load_spec": "torchrelay.config",
    "open_store": "torchrelay.store",
    "sample_generator": "torchrelay.data.loader",
}

__all__ = [
    "Checkpointer",
    "DatasetVersion",
    "ElasticSampler",
    "FaultSpec",
    "Job",
    "JobContext",
    "ObjectStore",
    "PendingCheckpoint",
    "RelayReader",
    "RelayWriter",
    "Restored",
    "RunSpec",
    "SaveSpec",
    "TrainSpec",
    "TrainingState",
    "WorldSpec",
    "elastic_loader",
    "load_spec",
    "open_store",
    "sample_generator",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'torchrelay' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
