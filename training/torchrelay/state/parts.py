"""What of a tensor this rank holds: plain tensors are whole on every rank, DTensors (FSDP2, HSDP, tensor parallel) are divided by their mesh."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.errors import UnserialisableError
from torchrelay.state.shards import Part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["PartTable", "as_zero", "is_dtensor", "local_tensor", "tensor_meta"]

Held = tuple[TensorMeta, Part]


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether this is a DTensor. Imports nothing: while nobody has imported their module (0.7 s) there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def as_zero(optimizer: object) -> Any:
    """Return the optimizer if it is a ZeroRedundancyOptimizer, else None. Imports nothing either."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return optimizer if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer) else None


def tensor_meta(tensor: torch.Tensor) -> TensorMeta:
    """Describe a tensor (a DTensor: all of it) for the manifest."""
    return TensorMeta(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of this rank, without its history."""
    if is_dtensor(tensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor.detach()


class PartTable:
    """Knows the parts of named tensors; remembers them, because working out a DTensor's offsets costs more than all else of a save."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._known: dict[str, tuple[tuple[Any, ...], Held]] = {}

    def held(self, name: str, tensor: torch.Tensor, *, own: bool = False) -> Held:
        """Return the description and the part of a tensor; ``own`` says that only this rank has it (ZeroRedundancyOptimizer).

        Raises UnserialisableError for a DTensor with partial sums: it has no value before they are added up.
        """
        layout = (id(tensor.device_mesh), tensor.placements) if is_dtensor(tensor) else None
        key = (tensor.dtype, tensor.shape, own, layout)
        known = self._known.get(name)
        if known is not None and known[0] == key:
            return known[1]
        meta = tensor_meta(tensor)
        part = self._divided(name, tensor) if is_dtensor(tensor) else self._whole(name, meta, own=own)
        self._known[name] = (key, (meta, part))
        return meta, part

    def _whole(self, name: str, meta: TensorMeta, *, own: bool) -> Part:
        holder, holders = (0, 1) if own else (self._rank, self._world_size)
        return Part(name, (0,) * len(meta.shape), meta.shape, holder, holders)

    def _divided(self, name: str, tensor: DTensor) -> Part:
        from torch.distributed.tensor import Partial, Replicate
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = tensor.device_mesh, tensor.placements
        if any(isinstance(placement, Partial) for placement in placements):
            raise UnserialisableError(
                f"{name} is a DTensor with partial sums ({placements})",
                hint="redistribute it to Shard or Replicate before",
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return Part(name, (0,) * tensor.ndim, (0,) * tensor.ndim)
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        holder, holders = 0, 1
        for axis, placement in enumerate(placements):
            if isinstance(placement, Replicate):
                holder, holders = holder * mesh.size(axis) + coordinate[axis], holders * mesh.size(axis)
        corner = tuple(offset) if math.prod(shape) else (0,) * tensor.ndim
        return Part(name, corner, tuple(shape), holder, holders)
