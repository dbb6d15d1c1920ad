"""One component of a checkpoint as a safetensors file: names as in its state dict, streamed, every byte hashed on the way."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.layout import DTYPES, ManifestRef
from torchrelay.checkpoint.manifest import Manifest
from torchrelay.checkpoint.reader import load_manifest
from torchrelay.checkpoint.regions import read_tensors
from torchrelay.checkpoint.typed import TensorRef, decode
from torchrelay.errors import ConfigError, NotFoundError
from torchrelay.store.base import ObjectStore

__all__ = ["export_safetensors", "new_file"]

_BATCH_BYTES = 256 * 2**20  # read at once; a larger tensor is read alone


def export_safetensors(
    store: ObjectStore, run_id: str, ref: ManifestRef, path: Path, *, component: str = "model"
) -> int:
    """Write the tensors of a component to ``path`` and return their number.

    Nested names are joined with dots; a tensor with several names (tied weights) is written under each, as loaders expect. The file appears
    only when it is complete. Raises NotFoundError for an unknown component, CorruptionError for a damaged checkpoint.
    """
    manifest = load_manifest(store, run_id, ref)
    if component not in manifest.state:
        known = ", ".join(sorted(manifest.state))
        raise NotFoundError(f"the checkpoint has no component {component!r}", hint=f"it has: {known}")
    names = dict(sorted(_tensors(decode(manifest.state[component], TensorRef))))
    head = _header(manifest, names, run_id)
    with new_file(path) as file:
        file.write(head)
        for batch in _batches(manifest, names):
            buffers = {tensor: bytearray(manifest.tensors[tensor].size_bytes) for tensor in batch.values()}
            read_tensors(store, manifest, {name: memoryview(data) for name, data in buffers.items() if data})
            for tensor in batch.values():
                file.write(buffers[tensor])
    return len(names)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Any]:
    """Open a file that takes its place only when the block ends well, and is on the disk then."""
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)


def _tensors(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name in the file, name in the checkpoint)."""
    if isinstance(tree, TensorRef):
        yield path, tree.name
    elif isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, item in items:
            yield from _tensors(item, f"{path}.{key}" if path else str(key))


def _header(manifest: Manifest, names: Mapping[str, str], run_id: str) -> bytes:
    """Length and JSON header as the format wants them: https://huggingface.co/docs/safetensors."""
    body: dict[str, Any] = {"__metadata__": {"format": "pt", "run": run_id, "step": str(manifest.ref.step)}}
    position = 0
    for name, tensor in names.items():
        meta = manifest.tensors[tensor]
        code, _ = DTYPES[meta.dtype]
        if code == "U8" and meta.dtype != "uint8":
            raise ConfigError(f"safetensors has no {meta.dtype} ({name})", hint="--format torch holds every type")
        end = position + meta.size_bytes
        body[name] = {"dtype": code, "shape": meta.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _batches(manifest: Manifest, names: Mapping[str, str]) -> Iterator[dict[str, str]]:
    batch: dict[str, str] = {}
    size = 0
    for name, tensor in names.items():
        more = manifest.tensors[tensor].size_bytes
        if batch and size + more > _BATCH_BYTES:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor
        size += more
    if batch:
        yield batch
