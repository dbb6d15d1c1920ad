"""Any part of any tensor can be read back, whatever ranks wrote it, and nothing more than that is fetched where it matters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpointing import RUN, new_run
from torchrelay.checkpoint.chunks import chunk_spans
from torchrelay.checkpoint.commit import Shard, commit_manifest, write_shard
from torchrelay.checkpoint.layout import DTYPES, ManifestRef
from torchrelay.checkpoint.manifest import Manifest, TensorMeta
from torchrelay.checkpoint.pack import Piece
from torchrelay.checkpoint.regions import Region, read_regions
from torchrelay.store.base import ObjectStore
from torchrelay.store.memory import MemoryStore

_REF = ManifestRef(1, 1)
_Boxes = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]


def _cut(size: int, parts: int) -> list[tuple[int, int]]:
    """Cut a dimension as ``torch.chunk`` does: (low, length), with empty parts at the end."""
    step = -(-size // parts) if size else 0
    return [(min(i * step, size), max(0, min(step, size - i * step))) for i in range(parts)]


def _mesh(shape: tuple[int, ...], parts: Sequence[int]) -> _Boxes:
    """Boxes of a tensor divided along each dimension into so many parts, in row-major order of the mesh."""
    axes = [_cut(size, count) for size, count in zip(shape, parts, strict=True)]
    return [(tuple(low for low, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*axes)]


def _elements(meta: TensorMeta, seed: int) -> np.ndarray[Any, Any]:
    """Random bytes, as elements without meaning."""
    item = DTYPES[meta.dtype][1]
    raw = np.random.default_rng(seed).integers(0, 256, meta.size_bytes, dtype=np.uint8)
    return raw.view(f"V{item}").reshape(meta.shape)


def _write(
    store: ObjectStore, tensors: dict[str, TensorMeta], layouts: Mapping[str, _Boxes], *, chunk_bytes: int
) -> Manifest:
    """Save with one rank per box; a tensor with fewer boxes than ranks lies on the first ones."""
    world = max(len(boxes) for boxes in layouts.values())
    head = Manifest(run_id=RUN, ref=_REF, world_size=world, begin=None, tensors=tensors, state={}).head()
    with ThreadPoolExecutor(2) as executor:
        for rank in range(world):
            boxes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
            pieces: list[Piece] = []
            for number, (name, meta) in enumerate(tensors.items()):
                if rank >= len(layouts[name]):
                    continue
                corner, extent = layouts[name][rank]
                item = DTYPES[meta.dtype][1]
                place = tuple(slice(low, low + n) for low, n in zip(corner, extent, strict=True))
                data = memoryview(np.ascontiguousarray(_elements(meta, number)[place]).tobytes())
                spans = chunk_spans(meta.shape, corner, extent, item, chunk_bytes=chunk_bytes)
                pieces += [
                    Piece(f"{name}{corner}@{start}", meta.dtype, len(boxes), start, data[start : start + length])
                    for start, length in spans
                ]
                boxes.append((name, corner, extent))
            shard = Shard(
                run_id=RUN,
                ref=_REF,
                rank=rank,
                world_size=world,
                tensors=tensors,
                boxes=tuple(boxes),
                pieces=tuple(pieces),
                head=head if rank == 0 else None,
            )
            write_shard(store, shard, executor=executor)
    manifest = commit_manifest(store, RUN, _REF)
    assert manifest is not None
    return manifest


def _read(store: ObjectStore, manifest: Manifest, wanted: Mapping[str, _Boxes], *, near: float) -> int:
    """Read every box of every tensor and compare it; returns the bytes fetched."""
    buffers, regions = [], []
    for number, (name, boxes) in enumerate(wanted.items()):
        meta = manifest.tensors[name]
        for corner, extent in boxes:
            buffer = bytearray(b"\xaa" * (math.prod(extent) * DTYPES[meta.dtype][1]))
            place = tuple(slice(low, low + n) for low, n in zip(corner, extent, strict=True))
            buffers.append((buffer, np.ascontiguousarray(_elements(meta, number)[place]).tobytes()))
            regions.append(Region(name, corner, extent, memoryview(buffer)))
    fetched = read_regions(store, manifest, regions, near=near, threads=2)
    assert all(bytes(buffer) == expected for buffer, expected in buffers)
    return fetched


_SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def _saves(draw: st.DrawFn) -> tuple[dict[str, TensorMeta], dict[str, _Boxes], dict[str, _Boxes]]:
    """Tensors of any type and shape, a mesh that wrote each, and any boxes that are wanted of it."""
    tensors, layouts = dict[str, TensorMeta](), dict[str, _Boxes]()
    wanted = dict[str, _Boxes]()
    for name in draw(st.lists(st.text("abc/.", min_size=1, max_size=4), min_size=1, max_size=4, unique=True)):
        meta = TensorMeta(draw(st.sampled_from(sorted(DTYPES))), draw(_SHAPES))
        tensors[name] = meta
        layouts[name] = _mesh(meta.shape, [draw(st.integers(1, 4)) for _ in meta.shape])
        boxes = []
        for _ in range(draw(st.integers(0, 3))):
            ranges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in meta.shape]
            boxes.append((tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges)))
        wanted[name] = boxes
    return tensors, layouts, wanted


@settings(max_examples=150, deadline=None)
@given(_saves(), st.sampled_from([8, 16, 48, 4096]), st.floats(0, 0.999))
def test_any_box_comes_back_from_any_mesh(
    save: tuple[dict[str, TensorMeta], dict[str, _Boxes], dict[str, _Boxes]], chunk_bytes: int, near: float
) -> None:
    """Uneven and empty shards, meshes of up to three dimensions, all element types, chunks that end in the middle of rows."""
    tensors, layouts, wanted = save
    store = MemoryStore()
    new_run(store)
    chunk_bytes = max(chunk_bytes, 16)  # a multiple of every element size
    manifest = _write(store, tensors, layouts, chunk_bytes=chunk_bytes)
    _read(store, manifest, wanted, near=near)


_WORLDS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("writers", _WORLDS)
def test_from_n_ranks_to_m_nothing_is_read_in_vain(writers: int) -> None:
    """Tensors of a real model's sizes, even and uneven: each of M ranks fetches at most 1.1 times what it needs, all together as well."""
    shapes = [(1024, 512), (3072, 512), (1000, 500), (513, 1024), (512,), (50257, 8)]
    tensors = {f"t{i}": TensorMeta("float32", shape) for i, shape in enumerate(shapes)}
    store = MemoryStore()
    new_run(store)
    layouts = {name: _mesh(meta.shape, [writers, *[1] * (len(meta.shape) - 1)]) for name, meta in tensors.items()}
    manifest = _write(store, tensors, layouts, chunk_bytes=4 * 2**20)
    for readers in _WORLDS:
        boxes = {name: _mesh(meta.shape, [readers, *[1] * (len(meta.shape) - 1)]) for name, meta in tensors.items()}
        total = 0
        for rank in range(readers):
            wanted = {name: [boxes[name][rank]] for name in tensors}
            needed = sum(math.prod(extent) * 4 for own in wanted.values() for _, extent in own)
            fetched = _read(store, manifest, wanted, near=(rank + 0.5) / readers)
            assert fetched <= 1.1 * needed, f"{writers} -> {readers}, rank {rank}: {fetched / needed:.2f}"
            total += fetched
        assert total <= 1.1 * manifest.size_bytes
