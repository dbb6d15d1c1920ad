"""The training state as named tensors plus typed JSON, and back.

Capturing copies nothing: it names the live tensors and says which of them only an optimizer step changes (those may be copied
while the next forward and backward run). Everything else is small and is encoded, or copied, in the call. Tensors that share
their memory (tied weights) are one tensor with several references, before and after. A tensor has the same name whether it is whole
(one process, DDP), divided (FSDP2, any DTensor) or with one owner (ZeroRedundancyOptimizer): so each may take over from the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.checkpoint.typed import TensorRef, decode, encode
from torchrelay.errors import StateMismatchError, UnserialisableError
from torchrelay.state.parts import PartTable, as_zero, is_dtensor, local_tensor, tensor_meta
from torchrelay.state.rng import capture_rng, restore_rng
from torchrelay.state.shards import Part

__all__ = ["Captured", "SamplerState", "Stateful", "TrainingState", "tensor_meta"]


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state dict of plain values and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""


@runtime_checkable
class SamplerState(Protocol):
    """A sampler whose position is a function of the optimizer step (``ElasticSampler``)."""

    def state_dict_at(self, step: int) -> dict[str, Any]:
        """Return the state after ``step`` optimizer steps have consumed their samples."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """One coherent view of the state: live tensors by name (this rank's memory), what they are and which part, typed JSON for the rest.

    ``lazy`` names the tensors that nothing but an optimizer step changes; ``watched`` are those whose version counters prove it. ``local`` belongs
    to this rank (RNG and per-rank components), ``fragment`` is what of the replicated state only this rank knows.
    """

    tensors: dict[str, torch.Tensor]
    watched: dict[str, tuple[torch.Tensor, ...]]
    metas: dict[str, TensorMeta]
    parts: dict[str, Part]
    lazy: frozenset[str]
    skeleton: dict[str, Any]
    data: dict[str, Any]
    local: dict[str, Any]
    fragment: dict[str, Any] | None = None


@dataclass(kw_only=True)
class TrainingState:
    """Everything a run needs to go on as if it had never stopped.

    ``extra`` and ``ema`` are replicated like the model; ``per_rank`` components differ between ranks and are kept for each. The RNG of every rank is
    always included. DDP and torch.compile wrappers are seen through, so a checkpoint loads with or without them.

    Example:
        >>> state = TrainingState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    sampler: SamplerState | None = None
    scaler: Stateful | None = None
    ema: nn.Module | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.extra, *self.per_rank):
            if name in ("model", "optimizer", "scheduler", "scaler", "ema") or not name.isidentifier():
                raise ValueError(f"{name!r} cannot be the name of an extra component")

    def components(self) -> dict[str, Stateful]:
        """Replicated components by name, wrappers removed."""
        named: dict[str, Any] = {
            "model": unwrap(self.model),
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "ema": unwrap(self.ema) if self.ema is not None else None,
            **self.extra,
        }
        return {name: part for name, part in named.items() if part is not None}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All torch optimizers among the components."""
        return [part for part in self.components().values() if isinstance(part, torch.optim.Optimizer)]

    def capture(self, step: int, table: PartTable | None = None) -> Captured:
        """Name the live state after ``step`` optimizer steps. Raises UnserialisableError naming what cannot be stored.

        ``table`` knows which part of each tensor this rank holds; without it the rank is taken for the only one.
        """
        flat = _Flattener(table or PartTable(rank=0, world_size=1))
        skeleton, lazy = {}, set[str]()
        fragments: dict[str, Any] = {}
        for name, part in self.components().items():
            own = as_zero(part) is not None
            tree = _tree(part)
            try:
                if isinstance(part, torch.optim.Optimizer):
                    _check_divided_alike(name, part, tree)
                skeleton[name] = encode(flat.name_tensors(tree, name, own=own), name)
            except RecursionError:
                raise UnserialisableError(f"the state of {name} contains itself, or is nested too deeply") from None
            if own:
                fragments[name] = skeleton[name]["state"].get("$dict", [])
            lazy |= _changed_by_optimizer_only(name, part, flat.tensors)
        own_flat = _Flattener(PartTable(rank=0, world_size=1))
        ranked = {name: part.state_dict() for name, part in self.per_rank.items()}
        local_tree = own_flat.name_tensors({"rng": capture_rng(), **ranked}, "local")
        local = {
            "tree": encode(local_tree, "local"),
            "tensors": {name: _inline(t) for name, t in own_flat.tensors.items()},
        }
        data = self.sampler.state_dict_at(step) if self.sampler is not None else {}
        return Captured(
            tensors=flat.tensors,
            watched=flat.watched,
            metas=flat.metas,
            parts=flat.parts,
            lazy=frozenset(lazy & flat.tensors.keys()),
            skeleton=skeleton,
            data=data,
            local=local,
            fragment=_fragment(fragments, flat.metas),
        )

    def check_fits(self, tensors: Mapping[str, TensorMeta], skeleton: Mapping[str, Any]) -> None:
        """Compare a checkpoint with this program before anything is read. Raises StateMismatchError listing what differs."""
        components = self.components()
        problems = [f"the checkpoint has no {name!r}" for name in components if name not in skeleton]
        problems += [
            f"the checkpoint holds a {name!r}, which this program does not have"
            for name in skeleton
            if name not in components
        ]
        for name, part in components.items():
            if isinstance(part, nn.Module) and name in skeleton:
                problems += _compare(name, part, skeleton[name], tensors)
        if problems:
            more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
            raise StateMismatchError(
                "the checkpoint does not fit this program: " + "; ".join(problems[:8]) + more,
                hint="build the same model and optimizer as the run did, or start a new run_id",
            )

    def load(self, trees: Mapping[str, Any], data: dict[str, Any]) -> None:
        """Give every replicated component its state back (see ``restore.Targets``); the sampler last, the RNG not at all."""
        for name, part in self.components().items():
            try:
                part.load_state_dict(trees[name])
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateMismatchError(f"{name} refused the state in the checkpoint: {error}") from error
        if self.sampler is not None and data:
            self.sampler.load_state_dict(data)

    def load_local(self, local: Mapping[str, Any]) -> None:
        """Give this rank its own components and, last of all, its RNG back."""
        tensors = {name: _outline(body) for name, body in local["tensors"].items()}
        tree = decode(local["tree"], tensors.__getitem__)
        for name, part in self.per_rank.items():
            if name not in tree:
                raise StateMismatchError(f"the checkpoint has no per-rank {name!r}")
            part.load_state_dict(tree[name])
        restore_rng(tree["rng"])


def unwrap(module: nn.Module) -> nn.Module:
    """Remove DistributedDataParallel and torch.compile wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


class _Flattener:
    """Replaces tensors in a tree by references, giving one name to all references to the same memory."""

    def __init__(self, table: PartTable) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.watched: dict[str, tuple[torch.Tensor, ...]] = {}
        self.metas: dict[str, TensorMeta] = {}
        self.parts: dict[str, Part] = {}
        self._table = table
        self._names: dict[tuple[Any, ...], str] = {}

    def name_tensors(self, value: Any, path: str, *, own: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorRef(self._name(value, path, own=own))
        kind = type(value)
        if isinstance(value, dict):
            items = {key: self.name_tensors(item, f"{path}/{key}", own=own) for key, item in value.items()}
            return _same_kind(value, items)
        if kind in (list, tuple):
            return kind(self.name_tensors(item, f"{path}/{index}", own=own) for index, item in enumerate(value))
        return value

    def _name(self, tensor: torch.Tensor, path: str, *, own: bool) -> str:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise UnserialisableError(
                f"{path} is a {tensor.layout} tensor on {tensor.device}; only strided tensors with data can be stored"
            )
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) and not is_dtensor(tensor):
            raise UnserialisableError(
                f"{path} is a {type(tensor).__qualname__}, a tensor subclass that has no typed encoding"
            )
        memory = local_tensor(tensor)
        key = (
            (memory.device, memory.data_ptr(), memory.shape, memory.stride(), memory.dtype)
            if memory.numel()
            else (path,)
        )
        name = self._names.setdefault(key, path)
        if name not in self.tensors:
            self.tensors[name] = memory
            self.watched[name] = (tensor, memory)
            self.metas[name], self.parts[name] = self._table.held(name, tensor, own=own)
        return name


def _tree(part: Stateful) -> Any:
    """The state dict of one component, with the live tensors in it and without any communication."""
    if isinstance(part, nn.Module):
        return part.state_dict(keep_vars=True)
    zero = as_zero(part)
    if zero is not None:
        groups = torch.optim.Optimizer.state_dict(zero)["param_groups"]
        index = zero._param_to_index
        own = {index[param]: state for param, state in zero.optim.state.items() if state}
        return {"state": dict(sorted(own.items())), "param_groups": groups}
    return part.state_dict()


def _check_divided_alike(name: str, optimizer: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
    """Refuse state of a divided parameter that is itself a plain tensor: it would be this rank's part, taken for the whole."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, state in tree["state"].items():
        if index < len(params) and is_dtensor(params[index]):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and not is_dtensor(value) and value.numel() > 1:
                    raise UnserialisableError(
                        f"{name}/state/{index}/{key} is a plain tensor beside a DTensor parameter",
                        hint="the optimizer must make its state with torch.zeros_like(parameter) or the like",
                    )


def _fragment(fragments: Mapping[str, Any], metas: Mapping[str, TensorMeta]) -> dict[str, Any] | None:
    if not fragments:
        return None
    tensors = {
        name: [meta.dtype, meta.shape]
        for name, meta in metas.items()
        if any(name.startswith(f"{component}/state/") for component in fragments)
    }
    return {"tensors": tensors, "items": dict(fragments)}


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


def _changed_by_optimizer_only(name: str, part: Stateful, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Name the tensors of one component that forward and backward leave alone: parameters and optimizer moments, not buffers."""
    if isinstance(part, nn.Module):
        return {f"{name}/{key}" for key, _ in part.named_parameters(remove_duplicate=False)}
    if isinstance(part, torch.optim.Optimizer):
        return {key for key in tensors if key.startswith(f"{name}/state/")}
    return set()


def _compare(name: str, module: nn.Module, node: Any, tensors: Mapping[str, TensorMeta]) -> list[str]:
    stored = decode(node, lambda ref: tensors[ref])
    problems = []
    for key, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue
        there, here = stored.get(key), tensor_meta(value)
        if there is None:
            problems.append(f"{name}.{key} is not in the checkpoint")
        elif there != here:
            problems.append(
                f"{name}.{key} is {there.dtype}{list(there.shape)} in the checkpoint, {here.dtype}{list(here.shape)} here"
            )
    unknown = stored.keys() - module.state_dict().keys()
    return problems + [f"{name}.{key} is in the checkpoint but not here" for key in sorted(unknown)]


def _inline(tensor: torch.Tensor) -> Any:
    meta = tensor_meta(tensor)
    flat = tensor.cpu().contiguous().reshape(-1)
    return [meta.dtype, list(meta.shape), encode(flat.view(torch.uint8).numpy() if flat.numel() else None)]


def _outline(body: Any) -> torch.Tensor:
    dtype, shape, node = body
    kind: torch.dtype = getattr(torch, dtype)
    if node is None:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(decode(node, str)).view(kind).reshape(shape)
