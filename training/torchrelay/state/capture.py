"""The training state as named tensors plus typed JSON, and back.

Capturing has two halves. ``hold`` takes hold of the live tensors that only an optimizer step changes (parameters, moments), and copies or encodes
everything else, which is small; ``Describer`` names and encodes what was held, and may run beside the next forward and backward. Tensors that
share their memory (tied weights) are one tensor with several references, before and after. A tensor has the same name whether it is whole
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
from torchrelay.checkpoint.typed import decode
from torchrelay.errors import CorruptionError, StateMismatchError
from torchrelay.state.flatten import Flattener, encode_tree
from torchrelay.state.parts import PartTable, as_zero, is_dtensor, tensor_meta
from torchrelay.state.rng import capture_rng, restore_rng

__all__ = ["Instant", "SamplerState", "Stateful", "TrainingState", "tensor_meta"]


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

    ``fixed`` holds the trees of modules and optimizers as far as they consist of tensors: live ones where only an optimizer step changes them
    (all of them again in ``live``, with their version counters in ``versions``), and copies of the others (again in ``copies``). ``varying`` is
    what else these trees hold, copied. ``encoded`` are the other components, as typed JSON, with copies of their tensors in ``eager``;
    ``ranked`` and ``own`` the same for the per-rank components.
    """

    fixed: dict[str, Any]
    varying: dict[str, Any]
    live: list[torch.Tensor]
    versions: list[int]
    copies: list[torch.Tensor]
    encoded: dict[str, Any]
    eager: Flattener
    ranked: dict[str, Any]
    own: Flattener
    rng: dict[str, Any]
    data: dict[str, Any]

    def check_unmoved(self, step: int) -> None:
        """Raise CorruptionError if a live tensor was changed since: a snapshot that was copied meanwhile mixes two steps.

        The fused and foreach optimizers change DTensors without counting; the plain step counts beside them tell on those.
        """
        if [tensor._version for tensor in self.live] == self.versions:
            return
        moved = [tensor for tensor, version in zip(self.live, self.versions, strict=True) if tensor._version != version]
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in moved[:3])
        raise CorruptionError(
            f"the snapshot of step {step} is torn: {len(moved)} tensors changed while they were copied (shapes {shapes} ...)",
            hint="change parameters and optimizer state only in optimizer.step(), or call PendingCheckpoint.wait_staged() before",
        )


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

    def hold(self, step: int) -> Instant:
        """Take hold of the state after ``step`` optimizer steps: quick, and all that must happen before the next forward.

        Makes few new objects for many tensors: thousands of them at each save would set off the garbage collector on the training thread.
        """
        instant = Instant(
            fixed={},
            varying={},
            live=[],
            versions=[],
            copies=[],
            encoded={},
            eager=Flattener(PartTable.copying()),
            own=Flattener(PartTable.copying()),
            data=self.sampler.state_dict_at(step) if self.sampler is not None else {},
            rng=capture_rng(),
            ranked={},
        )
        for name, part in self.components().items():
            if isinstance(part, nn.Module):
                _hold_module(instant, name, part.state_dict(keep_vars=True))
            elif isinstance(part, torch.optim.Optimizer):
                _hold_optimizer(instant, name, _optimizer_tree(part))
            else:
                instant.encoded[name] = encode_tree(instant.eager, part.state_dict(), name)
        for name, part in self.per_rank.items():
            instant.ranked[name] = encode_tree(instant.own, part.state_dict(), f"local/{name}")
        instant.versions.extend([tensor._version for tensor in instant.live])
        return instant

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


def _optimizer_tree(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer with its live tensors; of a ZeroRedundancyOptimizer what this rank has, without any communication."""
    zero = as_zero(optimizer)
    if zero is None:
        return optimizer.state_dict()
    groups = torch.optim.Optimizer.state_dict(zero)["param_groups"]
    index = zero._param_to_index
    own = {index[param]: state for param, state in zero.optim.state.items() if state}
    return {"state": dict(sorted(own.items())), "param_groups": groups}


def _hold_module(instant: Instant, name: str, tree: Mapping[str, Any]) -> None:
    fixed, varying, copies = dict[str, Any](), dict[str, Any](), dict[Any, torch.Tensor]()
    for key, value in tree.items():
        if isinstance(value, nn.Parameter):
            fixed[key] = value
            instant.live.append(value)
        elif isinstance(value, torch.Tensor):
            fixed[key] = _copied(value, copies)
            instant.copies.append(fixed[key])
        else:
            varying[key] = _copied(value, copies)
    instant.fixed[name] = fixed
    if varying:
        instant.varying[name] = varying


def _hold_optimizer(instant: Instant, name: str, tree: dict[str, Any]) -> None:
    state = tree.pop("state", {})
    leaves = [value for each in state.values() for value in (each.values() if isinstance(each, dict) else (each,))]
    tensors = [value for value in leaves if isinstance(value, torch.Tensor)]
    instant.live.extend(tensors)
    instant.fixed[name] = {"state": state} if len(tensors) == len(leaves) else {}
    instant.varying[name] = {**({} if instant.fixed[name] else {"state": state}), **_copied(tree, {})}


def _copied(value: Any, copies: dict[Any, torch.Tensor]) -> Any:
    """Copy a value that forward and backward may change: a tensor (one copy for one memory), or the containers and tensors of a state dict."""
    if isinstance(value, torch.Tensor):
        if not value.numel():
            return value.detach()
        place = id(value) if is_dtensor(value) else (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if place not in copies:
            copies[place] = value.detach().clone()
        return copies[place]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is dict:
        return {key: _copied(item, copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item, copies) for item in value)
    return copy.deepcopy(value)


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


def _outline(body: Any) -> torch.Tensor:
    dtype, shape, node = body
    kind: torch.dtype = getattr(torch, dtype)
    if node is None:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(decode(node, str)).view(kind).reshape(shape)
