"""A storage for ``torch.distributed.checkpoint``: its ``save``, ``async_save`` and ``load``, into and out of our store, with our commit.

What DCP calls a write item becomes a box of a tensor; values become typed JSON, never a pickle; the manifest's PUT is the commit. The tree of the
state dict is kept as it is, so that one reader serves what DCP saved and what a ``Checkpointer`` saved, and each may go on from the other.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torchrelay.checkpoint.commit import KnownChunks, commit_manifest
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.manifest import Manifest, TensorMeta
from torchrelay.checkpoint.typed import TensorRef, encode
from torchrelay.config import RunSpec
from torchrelay.errors import ConfigError, RetryableError
from torchrelay.state.dcp_reader import ELSEWHERE, RelayReader, step_of
from torchrelay.state.flatten import with_indices
from torchrelay.state.pieces import ShardBuilder, check_kind
from torchrelay.state.tenure import Tenure, begin_save, own_loop_spec
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["RelayReader", "RelayWriter"]


@dataclass(frozen=True, slots=True)
class _Wish:
    """What each rank tells the coordinator: the step it saves, and the values it could write."""

    step: int
    values: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Ticket:
    """What the coordinator tells each rank: the checkpoint's name, the one that it may refer to, and who it is in it."""

    ref: ManifestRef
    base: ManifestRef | None
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outline:
    """The checkpoint as the coordinator plans it: all tensors, the paths of all names, and whether other ranks have values of their own."""

    tensors: dict[str, TensorMeta]
    paths: dict[str, tuple[Any, ...]]
    flat: bool
    elsewhere: bool


class RelayWriter(StorageWriter):
    """Lets ``torch.distributed.checkpoint.save`` and ``async_save`` write a checkpoint of a run.

    Every rank constructs one, with the same arguments; ``checkpoint_id``, if it is given, is the step. Keep one for the life of the program: its
    saves upload only what has changed, and it is refused (FencedError) once another start of the run has taken over. One save at a time. A
    checkpoint exists once ``save`` returns; what fails before leaves the one before as the newest. DCP wraps errors into its CheckpointException.

    Example:
        >>> writer = RelayWriter("file:///mnt/checkpoints", run="my-run")
        >>> dcp.save({"model": model.state_dict()}, storage_writer=writer, checkpoint_id=str(step))
    """

    def __init__(self, store: str | ObjectStore = "", *, run: RunSpec | str, step: int | None = None) -> None:
        self._store, self._spec = store, own_loop_spec(run)
        self.step = step
        self._outline: _Outline | None = None
        self._tenure: Tenure | None = None
        self._known: tuple[ManifestRef, KnownChunks] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint; ``checkpoint_id`` is its step."""
        self.step = self.step if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be kept: a checkpoint without coordination is not one."""
        if kwargs.get("use_collectives") is False:
            raise ConfigError("use_collectives=False cannot be stored: the ranks of a checkpoint commit together")
        if self.step is None:
            raise ConfigError("no step is given", hint="RelayWriter(..., step=100), or save(..., checkpoint_id='100')")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Look at what this rank has to write. Raises UnserialisableError for tensors that cannot be stored."""
        if not plan.usable:
            raise ConfigError("a planner with enable_plan_caching=True cannot be used: it repeats the last save's name")
        for item in plan.items:
            if item.tensor_data is not None:
                properties = item.tensor_data.properties
                check_kind(item.index.fqn, properties.dtype, properties.layout)
        assert self.step is not None
        return replace(plan, storage_data=_Wish(self.step, frozenset(item.index.fqn for item in _values(plan))))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Win or renew the generation, and give rank 0 all values that it has too: then one manifest holds them."""
        wishes = [plan.storage_data for plan in plans]
        steps = {wish.step for wish in wishes}
        if len(steps) > 1:
            raise ConfigError(f"the ranks save different steps: {sorted(steps)}")
        moved = [item for plan in plans[1:] for item in _values(plan) if item.index.fqn in wishes[0].values]
        names = {item.index.fqn for item in moved}
        kept = [
            replace(plan, items=[item for item in plan.items if item.index.fqn not in names or item.tensor_data])
            for plan in plans[1:]
        ]
        plans = [replace(plans[0], items=[*plans[0].items, *moved]), *kept]
        self._outline = _outline(plans)
        before = self._tenure.claim.generation if self._tenure else 0
        why = "torch.distributed.checkpoint"
        self._tenure = begin_save(
            self._open(), self._spec, step=steps.pop(), world_size=len(plans), before=before, why=why
        )
        ref, base = self._tenure.ref(self._tenure.saving), self._tenure.base
        return [replace(plan, storage_data=_Ticket(ref, base, rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's packs and its record. Raises UnserialisableError naming a value that has no typed encoding."""
        ticket: _Ticket = plan.storage_data
        values = {item.index.fqn: _value(item, planner) for item in _values(plan)}
        nodes = {name: encode(value, name) for name, value in values.items()}
        builder, results = ShardBuilder(), [WriteResult(item.index, 0, None) for item in _values(plan)]
        for item in plan.items:
            if item.tensor_data is None:
                continue
            data, tensor = item.tensor_data, planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            if tensor.dtype != data.properties.dtype:
                raise ConfigError(f"{item.index.fqn} was planned as {data.properties.dtype} and is {tensor.dtype}")
            meta = TensorMeta(check_kind(item.index.fqn, tensor.dtype, tensor.layout), tuple(data.size))
            part = tensor.detach().reshape(data.chunk.sizes)
            size = builder.add(item.index.fqn, meta, tuple(data.chunk.offsets), part)
            results.append(WriteResult(item.index, size, None))
        fragment = {"tensors": {}, "items": {ELSEWHERE: sorted(map(list, nodes.items()))}}
        record = builder.write(
            self._open(),
            self._manifest(ticket, values) if ticket.rank == 0 else ticket.ref,
            run_id=self._spec.run_id,
            rank=ticket.rank,
            world_size=ticket.world_size,
            fragment=fragment if ticket.rank and nodes else None,
            known=self._known[1] if self._known and self._known[0] == ticket.base else None,
        )
        self._known = (ticket.ref, KnownChunks.of([record]))
        future = Future[list[WriteResult]]()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit."""
        assert self._tenure is not None
        ref = self._tenure.ref(self._tenure.saving)
        if commit_manifest(self._open(), self._spec.run_id, ref) is None:
            raise RetryableError(f"step {ref.step} is not committed: not all ranks' records are in the store")
        self._tenure.end_save(committed=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can name a checkpoint: the number of a step."""
        return str(checkpoint_id).isdecimal()

    def _open(self) -> ObjectStore:
        if isinstance(self._store, str):
            self._store = open_store(self._store)
        return self._store

    def _manifest(self, ticket: _Ticket, values: Mapping[str, Any]) -> Manifest:
        """What rank 0 knows: all of it but the records."""
        outline, tenure = self._outline, self._tenure
        assert outline is not None
        assert tenure is not None
        leaves = {name: TensorRef(name) for name in outline.tensors} | dict(values)
        tree = unflatten_state_dict(leaves, {name: outline.paths.get(name, (name,)) for name in leaves})
        state = {name: encode(with_indices(value), name) for name, value in tree.items()}
        if outline.elsewhere:
            if ELSEWHERE in state:
                raise ConfigError(f"the name {ELSEWHERE} is taken: other ranks' own values are kept there")
            state[ELSEWHERE] = {"state": {}}
        return Manifest(
            run_id=self._spec.run_id,
            ref=ticket.ref,
            world_size=ticket.world_size,
            begin=tenure.claim.begin,
            tensors=outline.tensors,
            state=state,
            info={"torch": torch.__version__, "spec_digest": self._spec.digest(), "dcp": {"flat": outline.flat}},
        )


def _values(plan: SavePlan) -> list[WriteItem]:
    return [item for item in plan.items if item.type == WriteItemType.BYTE_IO]


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the value itself where the planner gives it, else what its bytes hold (read without running code)."""
    if hasattr(planner, "lookup_object"):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    return torch.load(data, weights_only=True)


def _outline(plans: list[SavePlan]) -> _Outline:
    tensors: dict[str, TensorMeta] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for plan in plans:
        paths |= plan.planner_data or {}
        for item in plan.items:
            if item.tensor_data is not None:
                properties, size = item.tensor_data.properties, item.tensor_data.size
                kind = check_kind(item.index.fqn, properties.dtype, properties.layout)
                tensors[item.index.fqn] = TensorMeta(kind, tuple(size))
    elsewhere = any(_values(plan) for plan in plans[1:])
    return _Outline(tensors=tensors, paths=paths, flat=not paths, elsewhere=elsewhere)
