"""From a checkpoint into the live tensors: each rank reads the parts it holds, straight into their memory.

The tensors of modules are filled in place. Optimizer state is made like its parameter (divided as it is, on its device) and handed to
``load_state_dict``; the rest is read into host memory. A tensor that is not in host memory, or not contiguous, is read beside it and copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.manifest import Manifest, TensorMeta
from torchrelay.checkpoint.regions import Region
from torchrelay.checkpoint.typed import TensorRef, decode
from torchrelay.state.capture import TrainingState
from torchrelay.state.parts import PartTable, as_zero, is_dtensor, local_tensor
from torchrelay.state.pieces import bytes_of

__all__ = ["Targets"]


class Targets:
    """What a restore fills: one tensor per stored tensor that this rank needs, and the state dict of each component made of them."""

    def __init__(self, state: TrainingState, manifest: Manifest, table: PartTable) -> None:
        self._tensors, self._table = manifest.tensors, table
        self._made: dict[str, torch.Tensor] = {}
        self._own: set[str] = set()  # tensors that no other rank reads
        self._beside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.trees = {name: self._tree(part, manifest.state[name]) for name, part in state.components().items()}

    def regions(self) -> list[Region]:
        """The parts to read and the memory they go to. Call ``finish`` when all are filled."""
        regions = []
        for name, tensor in self._made.items():
            _, part = self._table.held(f"restore/{name}", tensor)
            memory = local_tensor(tensor)
            if not memory.numel():
                continue
            if memory.device.type != "cpu" or not memory.is_contiguous() or memory.is_conj() or memory.is_neg():
                pin = memory.device.type == "cuda"
                beside = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=pin)
                self._beside.append((memory, beside))
                memory = beside
            regions.append(
                Region(
                    name,
                    part.corner,
                    part.extent,
                    bytes_of(memory),
                    shared=name not in self._own and not is_dtensor(tensor),
                )
            )
        return regions

    def finish(self) -> None:
        """Move what was read beside its place."""
        with torch.no_grad():
            for memory, beside in self._beside:
                memory.copy_(beside)
        self._beside.clear()

    def _tree(self, part: Any, node: Any) -> Any:
        if isinstance(part, nn.Module):
            return self._module(part, node)
        if isinstance(part, torch.optim.Optimizer):
            return self._optimizer(part, node)
        return decode(node, self._make)

    def _module(self, module: nn.Module, node: Any) -> Any:
        live = module.state_dict(keep_vars=True)
        tree = decode(node, TensorRef)
        for key, value in tree.items():
            if isinstance(value, TensorRef):
                tree[key] = self._made.setdefault(value.name, live[key])
            else:
                tree[key] = _outlined(value, self._make)
        return tree

    def _optimizer(self, optimizer: torch.optim.Optimizer, node: Any) -> Any:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        zero = as_zero(optimizer)
        tree = decode(node, TensorRef)
        # Parameters are known by place, or by name where torch.distributed.checkpoint's state dicts were saved: the groups list them in order.
        stored = [key for group in tree["param_groups"] for key in group["params"]]
        live = dict(zip(stored, params, strict=False))
        for index, state in list(tree.get("state", {}).items()):
            param = live.get(index)
            if zero is not None and param is not None and zero._param_to_rank[param] != zero.rank:
                tree["state"][index] = None  # another rank's: not read here
                continue
            tree["state"][index] = _outlined(state, partial(self._make, param=param, own=zero is not None))
        return {**tree, "param_groups": _outlined(tree["param_groups"], self._make)}

    def _make(self, name: str, param: torch.Tensor | None = None, own: bool = False) -> torch.Tensor:
        """Make the tensor of this name, like the parameter it belongs to, unless it is there."""
        if name not in self._made:
            self._own |= {name} if own else set()
            self._made[name] = _like(self._tensors[name], param)
        return self._made[name]


def _outlined(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Put tensors in the place of references."""
    if isinstance(value, TensorRef):
        return tensor(value.name)
    if isinstance(value, Mapping):
        for key in value:
            value[key] = _outlined(value[key], tensor)  # type: ignore[index]
        return value
    if type(value) is deque:
        return deque((_outlined(item, tensor) for item in value), maxlen=value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(_outlined(item, tensor) for item in value)
    return value


def _like(meta: TensorMeta, param: torch.Tensor | None) -> torch.Tensor:
    """Make the state of a parameter: divided and placed as it is if it has its shape, else plain (``load_state_dict`` moves it)."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    if param is None or tuple(param.shape) != meta.shape or not meta.shape:
        return torch.empty(meta.shape, dtype=dtype)
    if not is_dtensor(param):
        return torch.empty(meta.shape, dtype=dtype, device=param.device)
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(local_tensor(param), dtype=dtype, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
