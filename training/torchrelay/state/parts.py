"""What of a tensor this rank holds: plain tensors are whole on every rank, DTensors (FSDP2, HSDP, tensor parallel) are divided by their mesh."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.errors import UnserialisableError
from torchrelay.state.shards import Part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Known", "PartTable", "as_zero", "is_dtensor", "local_tensor", "pointer", "tensor_meta"]


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


def pointer(tensor: torch.Tensor) -> int:
    """Address of this rank's memory of a tensor."""
    return tensor._local_tensor.data_ptr() if is_dtensor(tensor) else tensor.data_ptr()


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor at a path, as it was when it was last looked at closely."""

    tensor: torch.Tensor
    pointer: int
    memory: torch.Tensor
    place: tuple[Any, ...]
    meta: TensorMeta
    part: Part


class PartTable:
    """Knows the parts of named tensors, and remembers them: the tensors of a state are the same ones from save to save."""

    def __init__(self, *, rank: int, world_size: int, copy: bool = False) -> None:
        self._rank, self._world_size, self._copy = rank, world_size, copy
        self._known: dict[str, Known] = {}

    @classmethod
    def copying(cls) -> PartTable:
        """A table that copies each tensor it is shown, for state that may change at any time."""
        return cls(rank=0, world_size=1, copy=True)

    def remembered(self, path: str, tensor: torch.Tensor) -> Known | None:
        """Return what is known of this very tensor with this very memory."""
        known = self._known.get(path)
        return known if known is not None and known.tensor is tensor and known.pointer == pointer(tensor) else None

    def remember(
        self, path: str, tensor: torch.Tensor, memory: torch.Tensor, place: tuple[Any, ...], *, own: bool
    ) -> Known:
        """Look at a tensor closely; ``own`` says that only this rank has it. Raises as ``held`` does."""
        meta, part = self.held(path, tensor, own=own)
        memory = memory.clone() if self._copy else memory
        known = Known(tensor, pointer(tensor), memory, place, meta, part)
        self._known[path] = known
        return known

    def held(self, name: str, tensor: torch.Tensor, *, own: bool = False) -> tuple[TensorMeta, Part]:
        """Return the description and the part of a tensor; ``own`` says that only this rank has it (ZeroRedundancyOptimizer).

        Raises UnserialisableError for a DTensor with partial sums: it has no value before they are added up.
        """
        meta = tensor_meta(tensor)
        if is_dtensor(tensor):
            return meta, self._divided(name, tensor)
        return meta, Part(name, (0,) * len(meta.shape), meta.shape) if own else self.whole(name, meta)

    def whole(self, name: str, meta: TensorMeta) -> Part:
        """The part of a tensor that is whole on every rank."""
        return Part(name, (0,) * len(meta.shape), meta.shape, self._rank, self._world_size)

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
