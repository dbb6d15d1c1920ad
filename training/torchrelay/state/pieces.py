"""Tensors as bytes, and bytes as the pieces of a shard: for those who write a checkpoint without a staging area."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from torchrelay.checkpoint.chunks import chunk_spans
from torchrelay.checkpoint.commit import KnownChunks, Shard, write_shard
from torchrelay.checkpoint.layout import DTYPES, ManifestRef
from torchrelay.checkpoint.manifest import Manifest, ShardRecord, TensorMeta
from torchrelay.checkpoint.pack import Piece
from torchrelay.errors import UnserialisableError
from torchrelay.store.base import ObjectStore

__all__ = ["ShardBuilder", "bytes_of", "check_kind"]

_THREADS = 4


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Writable bytes of a contiguous tensor in host memory, of any element type. The caller keeps the tensor."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def check_kind(name: str, dtype: torch.dtype, layout: torch.layout) -> str:
    """Return the name of an element type. Raises UnserialisableError naming the tensor if it cannot be stored."""
    kind = str(dtype).removeprefix("torch.")
    if kind not in DTYPES or layout != torch.strided:
        raise UnserialisableError(
            f"{name} is a {layout} tensor of {dtype}; only strided tensors of {', '.join(DTYPES)}"
        )
    return kind


class ShardBuilder:
    """Collects the parts of tensors that one rank stores, and writes them as its shard."""

    def __init__(self) -> None:
        self._boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self._metas: dict[str, TensorMeta] = {}
        self._pieces: list[Piece] = []
        self._kept: list[torch.Tensor] = []
        self.size_bytes = 0

    def add(self, name: str, meta: TensorMeta, corner: tuple[int, ...], part: torch.Tensor) -> int:
        """Take a part of a tensor, which must not change before it is written; returns its bytes. What is not contiguous in host memory is copied."""
        memory = part.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        data = bytes_of(memory).toreadonly()
        if not data:
            return 0
        self._kept.append(memory)
        self._metas[name] = meta
        box = (name, corner, tuple(part.shape))
        self._boxes.append(box)
        self._pieces += _cut(len(self._boxes) - 1, box, meta, data)
        self.size_bytes += len(data)
        return len(data)

    def write(
        self,
        store: ObjectStore,
        manifest: Manifest | ManifestRef,
        *,
        run_id: str,
        rank: int = 0,
        world_size: int = 1,
        fragment: dict[str, Any] | None = None,
        known: KnownChunks | None = None,
    ) -> ShardRecord:
        """Write packs and record. Rank 0 gives the manifest (still without records), the others only its name."""
        whole = manifest if isinstance(manifest, Manifest) else None
        shard = Shard(
            run_id=run_id,
            ref=manifest.ref if isinstance(manifest, Manifest) else manifest,
            rank=rank,
            world_size=world_size,
            tensors=self._metas,
            boxes=tuple(self._boxes),
            pieces=tuple(self._pieces),
            head=whole.head() if whole else None,
            fragment=fragment,
        )
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="write") as executor:
            return write_shard(store, shard, executor=executor, known=known)


def _cut(
    number: int, box: tuple[str, tuple[int, ...], tuple[int, ...]], meta: TensorMeta, data: memoryview
) -> Iterator[Piece]:
    name, corner, extent = box
    place = f"{name}[{','.join(map(str, corner))}]" if any(corner) else name
    for start, length in chunk_spans(meta.shape, corner, extent, DTYPES[meta.dtype][1]):
        yield Piece(f"{place}@{start}", meta.dtype, number, start, data[start : start + length])
