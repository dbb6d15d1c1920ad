"""A state that others saved, as the first checkpoint of a new run: ``python -m torchrelay.state.intake REQUEST`` (JSON; store from the environment).

A process of its own, started by ``torchrelay import``, because the command line never loads torch. Files are read with ``weights_only=True``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.commit import commit_manifest
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.manifest import Manifest
from torchrelay.errors import ConfigError, ConflictError, NotFoundError, RetryableError, TorchrelayError
from torchrelay.state.dcp_folder import read_folder
from torchrelay.state.flatten import Flattener, encode_tree, with_indices
from torchrelay.state.parts import PartTable
from torchrelay.state.pieces import ShardBuilder
from torchrelay.state.tenure import begin_save, own_loop_spec
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["Intake", "read_source", "take_in"]

_NAMES = {
    "model": ("model", "model_state_dict", "state_dict"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optim"),
    "scheduler": ("scheduler", "scheduler_state_dict", "lr_scheduler"),
    "scaler": ("scaler", "scaler_state_dict"),
    "ema": ("ema", "ema_state_dict"),
}
_WRAPPERS = ("module.", "_orig_mod.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Intake:
    """What was found in a file: the components it gives, by name, the keys that were left out, and the step and sampler of a file of our own."""

    components: dict[str, Any]
    left_out: tuple[str, ...] = ()
    step: int = 0
    data: dict[str, Any]


def read_source(path: Path, *, only: Sequence[str] = ()) -> Intake:
    """Read a file of ``torch.save`` or a folder of torch.distributed.checkpoint. Raises ConfigError naming the keys there are, NotFoundError."""
    if not path.exists():
        raise NotFoundError(f"there is no {path}")
    loaded = read_folder(path) if path.is_dir() else _read_file(path)
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}", hint=_EXPECTED)
    if {"run_id", "step", "state", "data"} <= loaded.keys():  # torchrelay export --format torch
        intake = Intake(components=dict(loaded["state"]), step=int(loaded["step"]), data=dict(loaded["data"]))
    else:
        intake = _sorted_out(path, loaded)
    lacking = [name for name in only if name not in intake.components]
    if lacking:
        raise ConfigError(f"{path} has no component {lacking[0]!r}", hint=f"it has: {', '.join(intake.components)}")
    components = {
        name: with_indices(_plain(value)) for name, value in intake.components.items() if not only or name in only
    }
    components["model"] = _unwrapped(components["model"]) if "model" in components else {}
    if not components["model"]:
        raise ConfigError(f"{path} has no model", hint=_EXPECTED)
    left_out = (*intake.left_out, *(name for name in intake.components if name not in components))
    return Intake(components=components, left_out=left_out, step=intake.step, data=intake.data)


_EXPECTED = "a state dict of tensors is needed, or a dict of state dicts: 'model', and 'optimizer' if there is one"


def _sorted_out(path: Path, loaded: Mapping[str, Any]) -> Intake:
    """Tell a bare state dict from a dict of them."""
    if loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
        return Intake(components={"model": loaded}, data={})
    found = {
        name: key for name, keys in _NAMES.items() for key in reversed(keys) if isinstance(loaded.get(key), Mapping)
    }
    if "model" not in found:
        keys = ", ".join(sorted(map(str, loaded))[:12])
        raise ConfigError(f"{path} has no model; its keys are: {keys or 'none'}", hint=_EXPECTED)
    left_out = tuple(sorted(str(key) for key in loaded if key not in found.values()))
    return Intake(components={name: loaded[key] for name, key in found.items()}, left_out=left_out, data={})


def _read_file(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # a file of the old format
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # torch raises all kinds for what is no file of its own, or not plain data
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{path} cannot be loaded: {first[:300]}",
            hint="it must be a file of torch.save that holds tensors and plain values only: nothing that could run code is read",
        ) from None


def _plain(value: Any) -> Any:
    """Plain dicts, so that what is stored is the same whatever class of mapping it came in."""
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _unwrapped(tree: dict[str, Any]) -> dict[str, Any]:
    """Take off the prefixes of DistributedDataParallel and torch.compile, which a ``TrainingState`` sees through."""
    for prefix in _WRAPPERS * 2:
        if tree and all(key.startswith(prefix) for key in tree):
            tree = {key.removeprefix(prefix): value for key, value in tree.items()}
    return tree


def take_in(store: ObjectStore, intake: Intake, *, run_id: str, step: int = 0, origin: str = "") -> Manifest:
    """Commit what was read as the checkpoint of ``step`` of a new run. Raises ConflictError if the run has checkpoints, UnserialisableError."""
    flat = Flattener(PartTable(rank=0, world_size=1))
    state = {name: encode_tree(flat, tree, name) for name, tree in intake.components.items()}
    if read_history(store, run_id).latest is not None:
        raise ConflictError(f"run {run_id!r} has checkpoints already", hint="import into a new run: another --run-id")
    builder = ShardBuilder()
    for name, tensor in flat.tensors.items():
        builder.add(name, flat.metas[name], flat.parts[name].corner, tensor)
    spec = own_loop_spec(run_id)
    tenure = begin_save(store, spec, step=step or intake.step or 1, world_size=1, why=f"import of {origin}")
    committed = False
    try:
        manifest = Manifest(
            run_id=run_id,
            ref=tenure.ref(tenure.saving),
            world_size=1,
            begin=tenure.claim.begin,
            tensors=flat.metas,
            state=state,
            data=intake.data,
            info={"torch": torch.__version__, "spec_digest": spec.digest(), "imported": origin},
        )
        builder.write(store, manifest, run_id=run_id)
        whole = commit_manifest(store, run_id, manifest.ref)
        if whole is None:
            raise RetryableError(f"step {manifest.ref.step} is not committed: its record is not in the store")
        committed = True
    finally:
        tenure.end_save(committed=committed)
    return whole


def _main(request: str) -> int:
    asked = json.loads(request)
    try:
        own_loop_spec(asked["run_id"])
    except ValueError as error:
        print(f"torchrelay: {error}", file=sys.stderr)
        return ConfigError.exit_code
    try:
        intake = read_source(Path(asked["source"]), only=asked["only"])
        origin = Path(asked["source"]).name
        manifest = take_in(open_store(), intake, run_id=asked["run_id"], step=asked["step"], origin=origin)
    except TorchrelayError as error:
        print(f"torchrelay: {error}", file=sys.stderr)
        return error.exit_code
    told = {"step": manifest.ref.step, "tensors": len(manifest.tensors), "size_bytes": manifest.size_bytes}
    print(json.dumps({**told, "components": list(intake.components), "left_out": intake.left_out}))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
