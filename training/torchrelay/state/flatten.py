"""Replacing the tensors in a tree by references, with one name for all references to the same memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchrelay.checkpoint.layout import DTYPES
from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.checkpoint.typed import TensorRef, encode
from torchrelay.errors import UnserialisableError
from torchrelay.state.parts import PartTable, is_dtensor, local_tensor, tensor_meta
from torchrelay.state.shards import Part

__all__ = ["Flattener", "encode_tree", "with_indices"]


class Flattener:
    """Collects the tensors of a tree: this rank's memory, what each is, and which part of it this rank holds."""

    def __init__(self, table: PartTable) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.metas: dict[str, TensorMeta] = {}
        self.parts: dict[str, Part] = {}
        self._table = table
        self._names: dict[tuple[Any, ...], str] = {}
        self._memories: dict[int, torch.Tensor] = {}

    def name_tensors(self, value: Any, path: str, *, own: bool = False) -> Any:
        """Return the tree with references; ``own`` says that only this rank has these tensors. Raises UnserialisableError."""
        if isinstance(value, torch.Tensor):
            return TensorRef(self._name(value, path, own=own))
        kind = type(value)
        if isinstance(value, dict):
            items = {key: self.name_tensors(item, f"{path}/{key}", own=own) for key, item in value.items()}
            return _same_kind(value, items)
        if kind in (list, tuple):
            return kind(self.name_tensors(item, f"{path}/{index}", own=own) for index, item in enumerate(value))
        return value

    def memory_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory that was collected for a tensor of the tree."""
        return self._memories[id(tensor)]

    def _name(self, tensor: torch.Tensor, path: str, *, own: bool) -> str:
        known = self._table.remembered(path, tensor)
        if known is None:
            _check_storable(tensor, path)
            memory = local_tensor(tensor)
            place: tuple[Any, ...] = (path,)
            if memory.numel():
                place = (memory.device, memory.data_ptr(), memory.shape, memory.stride(), memory.dtype)
            known = self._table.remember(path, tensor, memory, place, own=own)
        name = self._names.setdefault(known.place, path)
        self._memories[id(tensor)] = self.tensors.get(name, known.memory)
        if name not in self.tensors:
            self.tensors[name], self.metas[name], self.parts[name] = known.memory, known.meta, known.part
        return name


def encode_tree(flat: Flattener, tree: Any, name: str, *, own: bool = False) -> Any:
    """Collect the tensors of a component's tree and return the rest as typed JSON. Raises UnserialisableError naming the path."""
    try:
        return encode(flat.name_tensors(tree, name, own=own), name)
    except RecursionError:
        raise UnserialisableError(f"the state of {name} contains itself, or is nested too deeply") from None


def with_indices(tree: Any) -> Any:
    """Give optimizers in a tree the integer keys of their ``state`` back, which the flat names of torch.distributed.checkpoint make strings."""
    if type(tree) is not dict:
        return tree
    state, groups = tree.get("state"), tree.get("param_groups")
    if type(state) is dict and state and type(groups) is list:
        known = {item for group in groups if isinstance(group, dict) for item in group.get("params", ())}
        if all(type(key) is str and key.isdecimal() and int(key) in known for key in state):
            return {**tree, "state": {int(key): item for key, item in state.items()}}
    return {key: with_indices(item) for key, item in tree.items()}


def _check_storable(tensor: torch.Tensor, path: str) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise UnserialisableError(
            f"{path} is a {tensor.layout} tensor on {tensor.device}; only strided tensors with data can be stored"
        )
    if tensor_meta(tensor).dtype not in DTYPES:
        raise UnserialisableError(f"{path} has elements of {tensor.dtype}, which the format does not know")
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) and not is_dtensor(tensor):
        raise UnserialisableError(
            f"{path} is a {type(tensor).__qualname__}, a tensor subclass that has no typed encoding"
        )


def _same_kind(original: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """Keep the class of a dict (OrderedDict, Counter ...); its type is checked when it is encoded."""
    if type(original) is dict:
        return items
    copy = original.copy()
    copy.clear()
    copy.update(items)
    if hasattr(copy, "_metadata"):  # nn.Module's version notes; load_state_dict does without
        del copy._metadata
    return copy
