"""Checkpoints that refer to packs of older ones: beside the small arrays of ``checkpointing`` a large one per rank that does not change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from tests.checkpointing import RUN, contents, expected, make_shards
from torchrelay.checkpoint.commit import KnownChunks, Shard, commit_manifest, write_shard
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.manifest import ShardRecord, TensorMeta
from torchrelay.checkpoint.pack import Piece
from torchrelay.checkpoint.reader import load_manifest, load_record, verify_checkpoint
from torchrelay.checkpoint.survey import take_survey
from torchrelay.checkpoint.sweep import plan_sweep, sweep
from torchrelay.store.memory import MemoryStore

__all__ = ["is_whole", "records_of", "save_with", "shards_with", "sweep_all", "write_with"]


def sweep_all(store: MemoryStore) -> int:
    """Sweep what counts for nobody, however young."""
    return sweep(store, plan_sweep(take_survey(store, RUN), grace_s=0.0))


def shards_with(ref: ManifestRef, frozen: ManifestRef) -> list[Shard]:
    """The shards of a checkpoint, and beside them a large tensor per rank that has not changed since ``frozen``."""
    shards = make_shards(ref)
    large = {f"large{shard.rank}": TensorMeta("float32", (4096,)) for shard in shards}
    grown = []
    for shard in shards:
        name = f"large{shard.rank}"
        data = np.random.default_rng([frozen.step, frozen.generation, shard.rank]).random(4096, dtype=np.float32)
        piece = Piece(f"{name}@0", "float32", len(shard.boxes), 0, memoryview(data.tobytes()))
        head = shard.head
        if head is not None:
            named = {key: [meta.dtype, meta.shape] for key, meta in large.items()}
            head = {**head, "tensors": {**head["tensors"], **named}}
        grown.append(
            replace(
                shard,
                tensors={**shard.tensors, **large},
                boxes=(*shard.boxes, (name, (0,), (4096,))),
                pieces=(*shard.pieces, piece),
                head=head,
            )
        )
    return grown


def write_with(store: MemoryStore, ref: ManifestRef, base: ManifestRef | None = None) -> None:
    """Write as couriers do: what has not changed since ``base`` is only referred to, as far as their own last records name it."""
    known = [KnownChunks.of([record]) for record in records_of(store, base)] if base else [None, None]
    with ThreadPoolExecutor(1) as executor:
        for shard, chunks in zip(shards_with(ref, _frozen_since(store, base) if base else ref), known, strict=True):
            write_shard(store, shard, executor=executor, known=chunks)


def save_with(store: MemoryStore, ref: ManifestRef, base: ManifestRef | None = None) -> None:
    write_with(store, ref, base)
    assert commit_manifest(store, RUN, ref) is not None


def _frozen_since(store: MemoryStore, ref: ManifestRef) -> ManifestRef:
    """The checkpoint whose large tensors this one has."""
    homes = [pack.home for record in records_of(store, ref) for pack in record.packs if pack.home]
    return homes[0] if homes else ref


def records_of(store: MemoryStore, ref: ManifestRef) -> list[ShardRecord]:
    manifest = load_manifest(store, RUN, ref)
    return [load_record(store, manifest, rank.rank) for rank in manifest.records]


def is_whole(store: MemoryStore, ref: ManifestRef) -> bool:
    """Every hash is right, and the small tensors have the values that only this checkpoint has."""
    verify_checkpoint(store, RUN, ref)
    return {name: data for name, data in contents(store, ref).items() if not name.startswith("large")} == expected(ref)
