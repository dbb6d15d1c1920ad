"""A whole checkpoint as one file of ``torch.save``, or as a folder of torch.distributed.checkpoint.

``python -m torchrelay.state.export RUN CHECKPOINT OUTPUT torch|dcp [COMPONENT]`` (store from the environment).

A process of its own, started by ``torchrelay export``, because the command line never loads torch.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.export import new_file
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.reader import load_manifest
from torchrelay.checkpoint.regions import read_tensors
from torchrelay.checkpoint.typed import decode
from torchrelay.errors import NotFoundError, TorchrelayError
from torchrelay.state.dcp_folder import write_folder
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["load_state"]


def load_state(store: ObjectStore, run_id: str, ref: ManifestRef) -> dict[str, Any]:
    """Read a checkpoint into CPU memory: ``run_id``, ``step``, ``state`` (state dict by component) and ``data`` (the sampler's).

    The RNG of the ranks is left out: it belongs to a resumed run. Tied weights share memory, as they did. Raises CorruptionError.
    """
    manifest = load_manifest(store, run_id, ref)
    raw = {name: torch.empty(meta.size_bytes, dtype=torch.uint8) for name, meta in manifest.tensors.items()}
    read_tensors(store, manifest, {name: data.numpy().data for name, data in raw.items() if len(data)})
    tensors = {
        name: raw[name].view(getattr(torch, meta.dtype)).reshape(meta.shape) for name, meta in manifest.tensors.items()
    }
    state = {name: decode(node, tensors.__getitem__) for name, node in manifest.state.items()}
    return {"run_id": run_id, "step": ref.step, "state": state, "data": manifest.data}


def _main(run_id: str, name: str, output: str, kind: str, component: str = "") -> int:
    match = re.fullmatch(r"(\d+)-g(\d+)", name)
    if match is None:
        raise SystemExit(f"{name} names no checkpoint")
    try:
        state = load_state(open_store(), run_id, ManifestRef(int(match[1]), int(match[2])))
        if kind == "dcp":
            write_folder(_component(state["state"], component) if component else state["state"], Path(output))
            return 0
        with new_file(Path(output)) as file:
            torch.save(state, file)
    except TorchrelayError as error:
        print(f"torchrelay: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _component(state: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(state.get(name), dict):
        raise NotFoundError(f"the checkpoint has no component {name!r}", hint=f"it has: {', '.join(sorted(state))}")
    return dict(state[name])


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
