"""Checkpoints made by hand, without torch: two ranks divide a few arrays whose values tell who wrote them and when."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from torchrelay.checkpoint.commit import Shard, commit_manifest, write_shard
from torchrelay.checkpoint.generation import GenerationClaim, open_run, start_generation
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.manifest import Manifest, TensorMeta
from torchrelay.checkpoint.pack import Piece
from torchrelay.checkpoint.reader import load_manifest
from torchrelay.checkpoint.regions import read_tensors
from torchrelay.config import RunSpec
from torchrelay.store.base import ObjectStore
from torchrelay.testing.clock import FakeClock

__all__ = ["RUN", "SPEC", "begin", "contents", "expected", "latest", "make_shards", "new_run", "save", "write"]

RUN = "r"
SPEC = RunSpec(run_id=RUN, total_steps=1000)
_SHAPES = {"model/w": (5, 7), "model/b": (3,), "optimizer/m": (5, 7), "empty": (0, 4), "scalar": ()}


def expected(ref: ManifestRef) -> dict[str, bytes]:
    """What the checkpoint of this name must hold: no two checkpoints share a value."""
    random = np.random.default_rng([ref.step, ref.generation])
    return {name: random.random(shape, dtype=np.float32).tobytes() for name, shape in _SHAPES.items()}


def make_shards(ref: ManifestRef, *, world_size: int = 2) -> list[Shard]:
    """Divide the arrays: each tensor is one box, its bytes go to the ranks in equal parts."""
    values = expected(ref)
    tensors = {name: TensorMeta("float32", shape) for name, shape in _SHAPES.items()}
    state = {name: {"$tensor": name} for name in _SHAPES}
    manifest = Manifest(
        run_id=RUN,
        ref=ref,
        world_size=world_size,
        begin=None,
        tensors=tensors,
        state=state,
        trace=((ref.step, float(ref.generation)),),
    )
    shards = []
    for rank in range(world_size):
        pieces = []
        for number, (name, data) in enumerate(values.items()):
            low, high = (4 * (len(data) // 4 * part // world_size) for part in (rank, rank + 1))
            if high > low:
                pieces.append(Piece(f"{name}@{low}", "float32", number, low, memoryview(data)[low:high]))
        shards.append(
            Shard(
                run_id=RUN,
                ref=ref,
                rank=rank,
                world_size=world_size,
                tensors=tensors,
                boxes=tuple((name, (0,) * len(shape), shape) for name, shape in _SHAPES.items()),
                pieces=tuple(pieces),
                local={"rank": rank},
                head=manifest.head() if rank == 0 else None,
            )
        )
    return shards


def write(store: ObjectStore, ref: ManifestRef, *, world_size: int = 2) -> None:
    """Upload all shards, without the commit."""
    with ThreadPoolExecutor(1) as executor:
        for shard in make_shards(ref, world_size=world_size):
            write_shard(store, shard, executor=executor)


def save(store: ObjectStore, ref: ManifestRef) -> None:
    """Write and commit, as couriers do."""
    write(store, ref)
    assert commit_manifest(store, RUN, ref) is not None


def new_run(store: ObjectStore) -> GenerationClaim:
    """Create the run and its first generation."""
    open_run(store, SPEC, provenance={})
    return begin(store)


def begin(store: ObjectStore) -> GenerationClaim:
    """Start the next generation; the lease of the one before lapses at once."""
    return start_generation(store, RUN, info={}, lease_s=1.0, clock=FakeClock())


def latest(store: ObjectStore) -> ManifestRef | None:
    """The newest checkpoint that counts."""
    return read_history(store, RUN).latest


def contents(store: ObjectStore, ref: ManifestRef) -> dict[str, bytes]:
    """Every tensor of a checkpoint, read as a restore reads it."""
    manifest = load_manifest(store, RUN, ref)
    buffers = {name: bytearray(meta.size_bytes) for name, meta in manifest.tensors.items()}
    read_tensors(store, manifest, {name: memoryview(buffer) for name, buffer in buffers.items() if buffer})
    return {name: bytes(buffer) for name, buffer in buffers.items()}
