"""Naming and encoding the state that was taken hold of, beside forward and backward.

The tensors of a state are the same objects from save to save, so the description of their trees is kept and only looked at again when one of
them is another: a save of thousands of tensors then costs a few lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.checkpoint.typed import encode
from torchrelay.errors import UnserialisableError
from torchrelay.state.capture import Instant, TrainingState
from torchrelay.state.flatten import Flattener, encode_tree
from torchrelay.state.nodes import join_nodes
from torchrelay.state.parts import PartTable, as_zero, is_dtensor, pointer, tensor_meta
from torchrelay.state.shards import Part

__all__ = ["Captured", "Describer", "Fixed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """What stays the same from save to save: tensors' names, descriptions, parts, and the nodes that consist of references to them.

    ``fragment`` is what of the replicated state only this rank knows (ZeroRedundancyOptimizer).
    """

    tensors: dict[str, torch.Tensor]
    metas: dict[str, TensorMeta]
    parts: dict[str, Part]
    nodes: dict[str, Any]
    fragment: dict[str, Any] | None
    live: list[torch.Tensor]
    pointers: list[int]
    copied: tuple[str, ...]

    def still_holds(self, instant: Instant) -> bool:
        """Whether the same tensors lie at the same places, and those that are copied have kept their form."""
        return (
            len(instant.live) == len(self.live)
            and all(map(is_, instant.live, self.live))
            and [pointer(tensor) for tensor in instant.live] == self.pointers
            and len(instant.copies) == len(self.copied)
            and all(
                (tensor.dtype, tensor.shape) == (self.tensors[name].dtype, self.tensors[name].shape)
                for name, tensor in zip(self.copied, instant.copies, strict=True)
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """One coherent view of the state: tensors by name (this rank's memory), what they are and which part, typed JSON for the rest.

    The node of a component is that in ``fixed`` joined with that in ``varying``. ``local`` belongs to this rank (RNG and per-rank components).
    """

    fixed: Fixed
    tensors: dict[str, torch.Tensor]
    metas: dict[str, TensorMeta]
    parts: dict[str, Part]
    varying: dict[str, Any]
    data: dict[str, Any]
    local: dict[str, Any]

    @property
    def skeleton(self) -> dict[str, Any]:
        """The nodes of all components."""
        return join_nodes(self.fixed.nodes, self.varying)


class Describer:
    """Describes instants of one training state. ``table`` knows which part of each tensor is this rank's."""

    def __init__(self, state: TrainingState, table: PartTable | None = None) -> None:
        self._state, self._table = state, table or PartTable(rank=0, world_size=1)
        self._fixed: Fixed | None = None

    def capture(self, step: int) -> Captured:
        """Describe the live state after ``step`` optimizer steps."""
        return self.describe(self._state.hold(step))

    def describe(self, instant: Instant) -> Captured:
        """Describe what was taken hold of. Raises UnserialisableError naming what cannot be stored."""
        fixed = self._fixed
        if fixed is None or not fixed.still_holds(instant):
            fixed = self._fixed = self._look(instant)
        eager = instant.eager
        varying = {name: encode_tree(eager, tree, name) for name, tree in instant.varying.items()} | instant.encoded
        tensors = fixed.tensors
        if fixed.copied:
            tensors = {**tensors, **dict(zip(fixed.copied, instant.copies, strict=True))}
        if not eager.tensors:
            metas, parts = fixed.metas, fixed.parts
        else:
            tensors, metas = {**tensors, **eager.tensors}, {**fixed.metas, **eager.metas}
            parts = fixed.parts | {name: self._table.whole(name, meta) for name, meta in eager.metas.items()}
        return Captured(
            fixed=fixed,
            tensors=tensors,
            metas=metas,
            parts=parts,
            varying=varying,
            data=instant.data,
            local=_local(instant),
        )

    def _look(self, instant: Instant) -> Fixed:
        flat = Flattener(self._table)
        nodes, items = dict[str, Any](), dict[str, Any]()
        for name, part in self._state.components().items():
            if name not in instant.fixed:
                continue
            zero = as_zero(part)
            if isinstance(part, torch.optim.Optimizer):
                _check_divided_alike(name, part, instant.fixed[name])
                _check_divided_alike(name, part, instant.varying[name])
            nodes[name] = encode_tree(flat, instant.fixed[name], name, own=zero is not None)
            if zero is not None:
                if "state" not in nodes[name]:
                    raise UnserialisableError(
                        f"{name} keeps more than tensors in its state, which cannot be divided over ranks"
                    )
                items[name] = nodes[name]["state"].get("$dict", [])
        names = {id(tensor): name for name, tensor in flat.tensors.items()}
        return Fixed(
            tensors=flat.tensors,
            metas=flat.metas,
            parts=flat.parts,
            nodes=nodes,
            fragment=_fragment(items, flat.metas),
            live=instant.live,
            pointers=[pointer(tensor) for tensor in instant.live],
            copied=tuple(names[id(flat.memory_of(tensor))] for tensor in instant.copies),
        )


def _check_divided_alike(name: str, optimizer: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
    """Refuse state of a divided parameter that is itself a plain tensor: it would be this rank's part, taken for the whole."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, state in tree.get("state", {}).items():
        if isinstance(state, dict) and index < len(params) and is_dtensor(params[index]):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not is_dtensor(value) and value.numel() > 1:
                    raise UnserialisableError(
                        f"{name}/state/{index}/{key} is a plain tensor beside a DTensor parameter",
                        hint="the optimizer must make its state with torch.zeros_like(parameter) or the like",
                    )


def _fragment(items: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> dict[str, Any] | None:
    if not items:
        return None
    prefixes = tuple(f"{component}/state/" for component in items)
    tensors = {name: [meta.dtype, meta.shape] for name, meta in metas.items() if name.startswith(prefixes)}
    return {"tensors": tensors, "items": dict(items)}


def _local(instant: Instant) -> dict[str, Any]:
    """What belongs to this rank alone, its tensors inline."""
    rng = encode_tree(instant.own, instant.rng, "local/rng")
    tensors = {name: _inline(tensor) for name, tensor in instant.own.tensors.items()}
    return {"tree": {"rng": rng, **instant.ranked}, "tensors": tensors}


def _inline(tensor: torch.Tensor) -> Any:
    meta = tensor_meta(tensor)
    flat = tensor.cpu().contiguous().reshape(-1)
    return [meta.dtype, list(meta.shape), encode(flat.view(torch.uint8).numpy() if flat.numel() else None)]
