"""Planning and committing with thousands of ranks: ``python -m benchmarks.scale [--quick]``.

A model of 1,000 tensors of 256 MiB is divided over 1,024 ranks as FSDP2 divides it. One rank's CPU time is that of planning its shard, describing it
to its courier, summing its cover and serialising its record: all that grows with tensors and ranks, without moving or hashing bytes. The leader
then commits what 10,000 such ranks wrote, in a store in memory, so that only its CPU time counts (writing their records first takes a minute).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.report import Bar, report
from torchrelay.checkpoint.commit import commit_manifest
from torchrelay.checkpoint.cover import cover_sum
from torchrelay.checkpoint.generation import open_run, start_generation
from torchrelay.checkpoint.layout import DTYPES, ManifestRef
from torchrelay.checkpoint.manifest import Box, Chunk, Manifest, PackInfo, ShardRecord, TensorMeta
from torchrelay.config import RunSpec
from torchrelay.state.shards import Part, ShardPlan, describe_plan, plan_shard
from torchrelay.store.base import ObjectStore
from torchrelay.store.memory import MemoryStore
from torchrelay.testing.clock import FakeClock

_RUN = "scale"
_SHAPE = (8192, 8192)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the tensors, and of the ranks whose records are committed"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    part = 10 if args.quick else 1
    tensors = {f"model/layers.{i}.weight": TensorMeta("float32", _SHAPE) for i in range(1000 // part)}
    world = 1024
    plans = [_cpu_s(lambda rank=rank: _record(tensors, rank, world)) for rank in range(7)]  # type: ignore[misc]
    leaders = _commit_s(tensors, 10_000 // part)
    figures = {"ranks": world, "tensors": len(tensors), "ms": [round(1e3 * value, 1) for value in sorted(plans)]}
    bars = [
        Bar(figure="plan and record, CPU ms per rank", value=1e3 * median(plans), bar=50.0 / part, detail=figures),
        Bar(
            figure="leader's commit, CPU s",
            value=median(leaders),
            bar=5.0 / part,
            detail={
                "ranks": 10_000 // part,
                "tensors": len(tensors),
                "s": [round(value, 2) for value in sorted(leaders)],
            },
        ),
    ]
    report("scale", bars, out=args.out)


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _parts(tensors: dict[str, TensorMeta], rank: int, world: int) -> list[Part]:
    rows = -(-_SHAPE[0] // world)
    low = min(rank * rows, _SHAPE[0])
    extent = (min(rows, _SHAPE[0] - low), _SHAPE[1])
    return [Part(name, (low, 0), extent) for name in tensors]


def _record(tensors: dict[str, TensorMeta], rank: int, world: int) -> bytes:
    """All that a rank and its courier compute for one save besides moving and hashing bytes."""
    plan = plan_shard(tensors, _parts(tensors, rank, world), world_size=world)
    describe_plan(plan, tensors)
    return _as_record(tensors, plan, rank, world, cover=None).to_bytes()


def _as_record(
    tensors: dict[str, TensorMeta], plan: ShardPlan, rank: int, world: int, *, cover: int | None
) -> ShardRecord:
    chunks: dict[str, list[Chunk]] = {}
    groups = 1 + max((piece.group for piece in plan.slices), default=0)
    for piece in plan.slices:
        digest = f"{hash((piece.tensor, piece.start)) & (2**64 - 1):032x}"
        chunks.setdefault(piece.tensor, []).append(
            Chunk(piece.start, piece.length, piece.group, 4096 + piece.offset % (48 * 2**20), digest)
        )
    boxes = tuple(Box(part.tensor, part.corner, part.extent, tuple(chunks[part.tensor])) for part in plan.parts)
    ref = ManifestRef(1, 1)
    head = None
    if rank == 0:
        head = Manifest(run_id=_RUN, ref=ref, world_size=world, begin=None, tensors=tensors, state={}).head()
    return ShardRecord(
        run_id=_RUN,
        ref=ref,
        rank=rank,
        world_size=world,
        packs=tuple(PackInfo(f"{rank:016x}{number:016x}", 64 * 2**20) for number in range(groups)),
        boxes=boxes,
        cover=cover_sum(tensors, boxes) if cover is None else cover,
        head=head,
    )


def _commit_s(tensors: dict[str, TensorMeta], world: int) -> list[float]:
    """CPU time of the leader's commit, three times."""
    store = MemoryStore()
    open_run(store, RunSpec(run_id=_RUN, total_steps=1), provenance={})
    start_generation(store, _RUN, info={}, lease_s=1.0, clock=FakeClock())
    _write_records(store, tensors, world)
    took = []
    for _ in range(3):
        took.append(_cpu_s(lambda: commit_manifest(store, _RUN, ManifestRef(1, 1))))
        assert store.list(f"runs/{_RUN}/manifests/").objects, "nothing was committed"
        store.delete([ManifestRef(1, 1).key(_RUN)])
    return took


def _write_records(store: ObjectStore, tensors: dict[str, TensorMeta], world: int) -> None:
    item = DTYPES["float32"][1]
    for rank in range(world):
        parts = _parts(tensors, rank, world)
        rows = parts[0].extent[0]
        size = rows * _SHAPE[1] * item
        boxes = tuple(
            Box(part.tensor, part.corner, part.extent, (Chunk(0, size, 0, 4096, "ab" * 16),)) for part in parts
        )
        boxes = boxes if rows else ()
        # The detail of most records is never read by a commit: leave it out, or 10,000 of them would fill the memory.
        record = ShardRecord(
            run_id=_RUN,
            ref=ManifestRef(1, 1),
            rank=rank,
            world_size=world,
            packs=(PackInfo(f"{rank:032x}", 4),),
            boxes=(),
            cover=cover_sum(tensors, boxes),
            head=Manifest(
                run_id=_RUN, ref=ManifestRef(1, 1), world_size=world, begin=None, tensors=tensors, state={}
            ).head()
            if rank == 0
            else None,
        )
        store.put(record.key, record.to_bytes())
        store.put(f"runs/{_RUN}/packs/{ManifestRef(1, 1)}/{rank:032x}.safetensors", b"pack")


if __name__ == "__main__":
    main()
