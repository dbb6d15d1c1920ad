"""From any number of ranks to any other, by the plan that real ranks make: uneven shards, meshes, replicas, every type."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpointing import RUN, new_run
from torchrelay.checkpoint.commit import Shard, commit_manifest, write_shard
from torchrelay.checkpoint.layout import DTYPES, PACK_BYTES, ManifestRef, packs_prefix
from torchrelay.checkpoint.manifest import Manifest, TensorMeta
from torchrelay.checkpoint.pack import Piece
from torchrelay.checkpoint.reader import verify_checkpoint
from torchrelay.checkpoint.regions import Region, read_regions
from torchrelay.state.shards import Part, plan_shard
from torchrelay.store.memory import MemoryStore

_REF = ManifestRef(1, 1)
_WORLDS = (1, 2, 3, 4, 8)
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """How one tensor lies on the ranks: the cuts of each dimension; each cell is held by ``holders`` ranks, one after another."""

    cuts: tuple[tuple[int, ...], ...]
    holders: int

    def parts(self, name: str, rank: int) -> list[Part]:
        """What a rank holds: one part, or an empty one if there are more ranks than cells."""
        axes = [list(itertools.pairwise(cut)) for cut in self.cuts]
        cells = list(itertools.product(*axes))
        number, holder = divmod(rank, self.holders)
        if number >= len(cells):
            return [Part(name, (0,) * len(axes), (0,) * len(axes))] if axes else []
        corner = tuple(low for low, _ in cells[number])
        extent = tuple(high - low for low, high in cells[number])
        return [Part(name, corner if math.prod(extent) else (0,) * len(axes), extent, holder, self.holders)]


def _value(meta: TensorMeta, seed: int) -> np.ndarray[Any, Any]:
    item = DTYPES[meta.dtype][1]
    raw = np.random.default_rng(seed).integers(0, 256, meta.size_bytes, dtype=np.uint8)
    return raw.view(f"V{item}").reshape(meta.shape)


def _within(value: np.ndarray[Any, Any], corner: Sequence[int], extent: Sequence[int]) -> bytes:
    place = tuple(slice(low, low + size) for low, size in zip(corner, extent, strict=True))
    return np.ascontiguousarray(value[place]).tobytes()


def _shard(
    rank: int, world: int, table: dict[str, TensorMeta], layouts: dict[str, _Layout], *, chunk_bytes: int
) -> Shard:
    """Stage what the plan says, as a rank and its courier do."""
    parts = [part for name in table for part in layouts[name].parts(name, rank)]
    plan = plan_shard(table, parts, world_size=world, chunk_bytes=chunk_bytes)
    held = {part.tensor: part for part in plan.parts}
    numbers = {name: number for number, name in enumerate(held)}
    data = {
        name: memoryview(_within(_value(table[name], sorted(table).index(name)), part.corner, part.extent))
        for name, part in held.items()
    }
    pieces = tuple(
        Piece(
            f"{item.tensor}{held[item.tensor].corner}@{item.start}",
            table[item.tensor].dtype,
            numbers[item.tensor],
            item.start,
            data[item.tensor][item.start : item.start + item.length],
            item.group,
        )
        for item in plan.slices
    )
    head = Manifest(run_id=RUN, ref=_REF, world_size=world, begin=None, tensors=table, state={}).head()
    return Shard(
        run_id=RUN,
        ref=_REF,
        rank=rank,
        world_size=world,
        tensors=table,
        boxes=tuple((part.tensor, part.corner, part.extent) for part in plan.parts),
        pieces=pieces,
        head=None if rank else head,
    )


def _save(
    world: int, table: dict[str, TensorMeta], layouts: dict[str, _Layout], *, chunk_bytes: int
) -> tuple[MemoryStore, Manifest]:
    store = MemoryStore()
    new_run(store)
    with ThreadPoolExecutor(2) as executor:
        for rank in range(world):
            assert commit_manifest(store, RUN, _REF) is None
            write_shard(store, _shard(rank, world, table, layouts, chunk_bytes=chunk_bytes), executor=executor)
    manifest = commit_manifest(store, RUN, _REF)
    assert manifest is not None
    return store, manifest


def _load(store: MemoryStore, manifest: Manifest, layouts: dict[str, _Layout], world: int) -> list[tuple[int, int]]:
    """Restore each rank of another world and compare every byte; returns what each fetched and what it needed."""
    costs = []
    for rank in range(world):
        wanted: list[tuple[bytearray, bytes]] = []
        regions = []
        for number, name in enumerate(sorted(manifest.tensors)):
            meta = manifest.tensors[name]
            for part in layouts[name].parts(name, rank):
                expected = _within(_value(meta, number), part.corner, part.extent)
                wanted.append((bytearray(b"\x55" * len(expected)), expected))
                regions.append(Region(name, part.corner, part.extent, memoryview(wanted[-1][0])))
        fetched = read_regions(store, manifest, regions, near=(rank + 0.5) / world, threads=2)
        assert all(bytes(found) == expected for found, expected in wanted), f"rank {rank} of {world}"
        costs.append((fetched, sum(len(expected) for _, expected in wanted)))
    return costs


def _layouts(draw: st.DrawFn, table: dict[str, TensorMeta], world: int) -> dict[str, _Layout]:
    """Draw a layout for each tensor: so many holders of each cell, and cells by uneven cuts along any dimensions."""
    made = {}
    for name, meta in table.items():
        holders = draw(st.sampled_from([count for count in range(1, world + 1) if world % count == 0]))
        left, cuts = world // holders, []
        for size in meta.shape:
            count = draw(st.sampled_from([count for count in range(1, left + 1) if left % count == 0]))
            left //= count
            inner = sorted(draw(st.integers(0, size)) for _ in range(count - 1))
            cuts.append((0, *inner, size))
        if not meta.shape:
            holders = world  # a scalar is on all ranks
        made[name] = _Layout(cuts=tuple(cuts), holders=holders)
    return made


@st.composite
def _moves(draw: st.DrawFn) -> tuple[dict[str, TensorMeta], int, dict[str, _Layout], int, dict[str, _Layout]]:
    """Tensors, the world and layouts that save them, the world and layouts that load them."""
    shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    names = draw(st.lists(st.text("ab/.", min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
    table = {name: TensorMeta(draw(st.sampled_from(sorted(DTYPES))), draw(shapes)) for name in names}
    before, after = draw(st.sampled_from(_WORLDS)), draw(st.sampled_from(_WORLDS))
    return table, before, _layouts(draw, table, before), after, _layouts(draw, table, after)


@settings(max_examples=150)
@given(_moves(), st.sampled_from([16, 48, 4096]))
def test_any_layout_takes_over_from_any_other(
    move: tuple[dict[str, TensorMeta], int, dict[str, _Layout], int, dict[str, _Layout]], chunk_bytes: int
) -> None:
    """Every byte that a rank of the new world holds is the one that was saved; the cover is proved box by box as well."""
    table, before, layouts, after, wanted = move
    store, manifest = _save(before, table, layouts, chunk_bytes=chunk_bytes)
    verify_checkpoint(store, RUN, _REF)
    _load(store, manifest, wanted, after)


def _rows(meta: TensorMeta, world: int) -> _Layout:
    """Cut the first dimension as FSDP does."""
    step = -(-meta.shape[0] // world)
    first = tuple(min(number * step, meta.shape[0]) for number in range(world + 1))
    return _Layout(cuts=(first, *((0, size) for size in meta.shape[1:])), holders=1)


@pytest.mark.parametrize("before", _WORLDS)
def test_large_tensors_cut_by_rows_are_not_read_in_vain(before: int) -> None:
    """Of every type size, even and uneven: no rank of the new world fetches more than 1.1 times what it holds, and packs keep their limit."""
    shapes = {"bfloat16": (2048, 1024), "float32": (50257, 24), "float8_e5m2": (4099, 1024), "complex128": (1001, 128)}
    table = {dtype: TensorMeta(dtype, shape) for dtype, shape in shapes.items()}
    layouts = {name: _rows(meta, before) for name, meta in table.items()}
    store, manifest = _save(before, table, layouts, chunk_bytes=4 * 2**20)
    assert all(item.size_bytes <= PACK_BYTES for item in store.list(packs_prefix(RUN)).objects)
    for after in _WORLDS:
        costs = _load(store, manifest, {name: _rows(meta, after) for name, meta in table.items()}, after)
        for rank, (fetched, needed) in enumerate(costs):
            assert fetched <= 1.1 * needed, f"{before} -> {after}, rank {rank}: {fetched / needed:.2f}"
