"""Reading any checkpoint of the store through ``torch.distributed.checkpoint.load``, whoever saved it (see ``dcp``).

Each tensor is shown to DCP as one piece; what its planner asks of it is read as regions: only the chunks that are needed, straight into the tensors,
every byte hashed first. So any layout loads any other.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchrelay.checkpoint.generation import read_run
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.manifest import Manifest
from torchrelay.checkpoint.reader import load_manifest
from torchrelay.checkpoint.regions import Region, read_regions
from torchrelay.checkpoint.typed import decode
from torchrelay.errors import ConfigError, NotFoundError, RetryableError
from torchrelay.state.pieces import bytes_of
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["ELSEWHERE", "RelayReader", "step_of"]

ELSEWHERE = "_other_ranks"
"""Component that holds the values which rank 0 does not have, by their flat names."""


def step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    """Read the step from DCP's ``checkpoint_id``. Raises ConfigError."""
    if not str(checkpoint_id).isdecimal():
        raise ConfigError(
            f"checkpoint_id {str(checkpoint_id)!r} is not a step", hint="give the number of the step, or none"
        )
    return int(str(checkpoint_id))


class RelayReader(StorageReader):
    """Lets ``torch.distributed.checkpoint.load`` read a checkpoint of a run: that of ``step``, or the newest that is committed.

    It reads what DCP saved with ``RelayWriter``, under the same names, and what a ``Checkpointer`` saved, as the state dicts of its components: load
    into ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`` or a part of it. A damaged checkpoint is CorruptionError, inside
    of DCP's CheckpointException. ``ref`` names what was loaded.

    Example:
        >>> state = {"model": model.state_dict()}
        >>> dcp.load(state, storage_reader=RelayReader("file:///mnt/checkpoints", run="my-run"))
        >>> model.load_state_dict(state["model"])
    """

    def __init__(self, store: str | ObjectStore = "", *, run: str, step: int | None = None) -> None:
        self._store, self._run, self.step = store, run, step
        self.ref: ManifestRef | None = None
        self._manifest: Manifest | None = None
        self._names: dict[str, str] = {}
        self._values: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to read another checkpoint; ``checkpoint_id`` is its step."""
        self.step = self.step if checkpoint_id is None else step_of(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Choose the checkpoint and say what it holds, by flat name. Raises NotFoundError, CorruptionError."""
        store = self._open()
        self.ref = _choose(store, self._run, self.step)
        self._manifest = manifest = load_manifest(store, self._run, self.ref)
        shown = {name: _outline(meta.dtype, meta.shape) for name, meta in manifest.tensors.items()}
        names = {id(tensor): name for name, tensor in shown.items()}
        leaves, paths = _leaves(
            {name: decode(node, shown.__getitem__) for name, node in manifest.state.items()}, manifest
        )
        self._names = {name: names[id(leaf)] for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        self._values = {name: leaf for name, leaf in leaves.items() if not _has_tensor(leaf)}
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, tensor in self._names.items():
            size = shown[tensor].shape
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            described[name] = TensorStorageMetadata(TensorProperties(dtype=shown[tensor].dtype), size, [whole])
        described |= {name: BytesStorageMetadata() for name in self._values}
        return Metadata(state_dict_metadata=described, planner_data={name: paths[name] for name in described})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which checkpoint this rank has chosen."""
        return replace(plan, storage_data=self.ref)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make sure that all ranks read the same checkpoint: one may have been committed while they looked."""
        chosen = {plan.storage_data for plan in plans}
        if len(chosen) > 1:
            raise RetryableError(
                f"ranks chose different checkpoints: {', '.join(map(str, chosen))}", hint="load again, or give a step"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for. Raises CorruptionError; the content of the tensors is undefined then."""
        assert self._manifest is not None
        regions, targets = [], []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(self._values[item.storage_index.fqn], data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            target = planner.resolve_tensor(item).detach()
            memory = self._memory_for(item, target)
            corner, extent = tuple(item.storage_offsets), tuple(item.lengths)
            if memory.numel():
                regions.append(Region(self._names[item.storage_index.fqn], corner, extent, bytes_of(memory)))
            targets.append((item, target, memory))
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        read_regions(self._open(), self._manifest, regions, near=(rank + 0.5) / world)
        for item, target, memory in targets:
            if memory is not target:
                target.copy_(memory.reshape(target.shape))
            planner.commit_tensor(item, target)
        future = Future[None]()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can name a checkpoint: the number of a step."""
        return str(checkpoint_id).isdecimal()

    def _open(self) -> ObjectStore:
        if isinstance(self._store, str):
            self._store = open_store(self._store)
        return self._store

    def _memory_for(self, item: ReadItem, target: torch.Tensor) -> torch.Tensor:
        """The target itself where it can take the bytes as they are, else memory beside it."""
        assert self._manifest is not None
        meta = self._manifest.tensors[self._names[item.storage_index.fqn]]
        dtype: torch.dtype = getattr(torch, meta.dtype)
        if (
            target.device.type == "cpu"
            and target.is_contiguous()
            and target.dtype == dtype
            and not (target.is_neg() or target.is_conj())
        ):
            return target
        return torch.empty(item.lengths, dtype=dtype)


def _choose(store: ObjectStore, run_id: str, step: int | None) -> ManifestRef:
    line = read_history(store, run_id).line
    chosen = [ref for ref in line if step is None or ref.step == step]
    if not chosen:
        read_run(store, run_id)  # says so if there is no such run
        steps = ", ".join(str(ref.step) for ref in line[-8:])
        what = f" of step {step}" if step is not None else ""
        raise NotFoundError(f"run {run_id!r} has no checkpoint{what}", hint=f"its newest: {steps or 'none yet'}")
    return chosen[-1]


def _outline(dtype: str, shape: Iterable[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")


def _leaves(tree: dict[str, Any], manifest: Manifest) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The leaves by flat name, and the path of each, as DCP itself flattens a state dict of this structure."""
    elsewhere = tree.pop(ELSEWHERE, {}).get("state", {})
    if manifest.info.get("dcp", {}).get("flat"):
        leaves = dict(tree)
        paths: dict[str, Any] = {name: (name,) for name in tree}
    else:
        leaves, paths = flatten_state_dict(tree)
    return leaves | elsewhere, paths | {name: (name,) for name in elsewhere}


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, list | tuple | set | frozenset) and any(map(_has_tensor, value))
