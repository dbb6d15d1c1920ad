"""The training state as named tensors plus typed JSON, and back.

Capturing has two halves. ``hold`` takes hold of the live tensors that only an optimizer step changes (parameters, moments), and copies or encodes
everything else, which is small; ``describe`` names and encodes what was held, and may run beside the next forward and backward. Tensors that share
their memory (tied weights) are one tensor with several references, before and after. A tensor has the same name whether it is whole
(one process, DDP), divided (FSDP2, any DTensor) or with one owner (ZeroRedundancyOptimizer): so each may take over from the other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.checkpoint.typed import decode, encode
from torchrelay.errors import CorruptionError, StateMismatchError, UnserialisableError
from torchrelay.state.flatten import Flattener
from torchrelay.state.parts import PartTable, as_zero, is_dtensor, tensor_meta
from torchrelay.state.rng import capture_rng, restore_rng
from torchrelay.state.shards import Part

__all__ = ["Captured", "Instant", "SamplerState", "Stateful", "TrainingState", "tensor_meta"]


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
class Instant:
    """The state at one instant, before anything is copied.

    ``trees`` holds the state dicts of modules and optimizers: live tensors where only an optimizer step changes them (``versions`` are their paths
    and version counters), copies of all others. ``eager`` are the other components, encoded already, with copies of their tensors.
    """

    trees: dict[str, Any]
    versions: tuple[tuple[str, torch.Tensor, int], ...]
    encoded: dict[str, Any]
    eager: Flattener
    data: dict[str, Any]
    local: dict[str, Any]

    def check_unmoved(self, step: int) -> None:
        """Raise CorruptionError if a live tensor was changed since: a snapshot that was copied meanwhile mixes two steps.

        The fused and foreach optimizers change DTensors without counting; the plain step counts beside them tell on those.
        """
        moved = [path for path, tensor, version in self.versions if tensor._version != version]
        if moved:
            raise CorruptionError(
                f"the snapshot of step {step} is torn: {len(moved)} tensors changed while they were copied (first: {moved[0]})",
                hint="change parameters and optimizer state only in optimizer.step(), or call PendingCheckpoint.wait_staged() before",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """One coherent view of the state: tensors by name (this rank's memory), what they are and which part, typed JSON for the rest.

    ``local`` belongs to this rank (RNG and per-rank components), ``fragment`` is what of the replicated state only this rank knows.
    """

    tensors: dict[str, torch.Tensor]
    metas: dict[str, TensorMeta]
    parts: dict[str, Part]
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
        """Describe the live state after ``step`` optimizer steps. Raises UnserialisableError naming what cannot be stored."""
        return self.describe(self.hold(step), table or PartTable(rank=0, world_size=1))

    def hold(self, step: int) -> Instant:
        """Take hold of the state after ``step`` optimizer steps: quick, and all that must happen before the next forward."""
        trees, versions = dict[str, Any](), list[tuple[str, torch.Tensor, int]]()
        encoded, eager = dict[str, Any](), Flattener(PartTable.copying())
        for name, part in self.components().items():
            tree = _tree(part)
            if isinstance(part, nn.Module | torch.optim.Optimizer):
                trees[name] = _held(tree, name, isinstance(part, nn.Module), versions)
            else:
                encoded[name] = _encode(eager, tree, name)
        own = Flattener(PartTable(rank=0, world_size=1))
        ranked = {name: part.state_dict() for name, part in self.per_rank.items()}
        tree = _encode(own, {"rng": capture_rng(), **ranked}, "local")
        return Instant(
            trees=trees,
            versions=tuple(versions),
            encoded=encoded,
            eager=eager,
            data=self.sampler.state_dict_at(step) if self.sampler is not None else {},
            local={"tree": tree, "tensors": {name: _inline(tensor) for name, tensor in own.tensors.items()}},
        )

    def describe(self, instant: Instant, table: PartTable) -> Captured:
        """Name and encode what was taken hold of; may run beside forward and backward. ``table`` knows which part of each tensor is this rank's."""
        flat = Flattener(table)
        skeleton, fragments = dict[str, Any](), dict[str, Any]()
        for name, part in self.components().items():
            if name in instant.encoded:
                skeleton[name] = instant.encoded[name]
                continue
            tree = instant.trees[name]
            own = as_zero(part) is not None
            if isinstance(part, torch.optim.Optimizer):
                _check_divided_alike(name, part, tree)
            skeleton[name] = _encode(flat, tree, name, own=own)
            if own:
                fragments[name] = skeleton[name]["state"].get("$dict", [])
        eager = instant.eager
        copied = {name: table.whole(name, meta) for name, meta in eager.metas.items()}
        return Captured(
            tensors={**flat.tensors, **eager.tensors},
            metas={**flat.metas, **eager.metas},
            parts={**flat.parts, **copied},
            skeleton=skeleton,
            data=instant.data,
            local=instant.local,
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


def _held(
    tree: Mapping[str, Any], name: str, is_module: bool, versions: list[tuple[str, torch.Tensor, int]]
) -> dict[str, Any]:
    """Keep live tensors that only an optimizer step changes (parameters, optimizer state), noting their versions; copy all others."""
    copies: dict[Any, torch.Tensor] = {}
    if is_module:
        held = {}
        for key, value in tree.items():
            if isinstance(value, nn.Parameter):
                versions.append((f"{name}/{key}", value, value._version))
                held[key] = value
            else:
                held[key] = _copied(value, copies)
        return held
    for index, state in tree.get("state", {}).items():
        if isinstance(state, dict):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    versions.append((f"{name}/state/{index}/{key}", value, value._version))
    return {key: value if key == "state" else _copied(value, copies) for key, value in tree.items()}


def _copied(value: Any, copies: dict[Any, torch.Tensor]) -> Any:
    """Copy a value that forward and backward may change: a tensor (one copy for one memory), or the containers and tensors of a state dict."""
    if isinstance(value, torch.Tensor):
        place = id(value) if is_dtensor(value) else (value.data_ptr(), value.shape, value.stride(), value.dtype)
        return copies.setdefault(place, value.detach().clone()) if value.numel() else value.detach()
    if type(value) is dict:
        return {key: _copied(item, copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item, copies) for item in value)
    return copy.deepcopy(value)


def _encode(flat: Flattener, tree: Any, name: str, *, own: bool = False) -> Any:
    try:
        return encode(flat.name_tensors(tree, name, own=own), name)
    except RecursionError:
        raise UnserialisableError(f"the state of {name} contains itself, or is nested too deeply") from None


def _check_divided_alike(name: str, optimizer: torch.optim.Optimizer, tree: Mapping[str, Any]) -> None:
    """Refuse state of a divided parameter that is itself a plain tensor: it would be this rank's part, taken for the whole."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, state in tree.get("state", {}).items():
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
