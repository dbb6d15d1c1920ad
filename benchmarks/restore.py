"""Time to restore from S3, and bytes read for it: ``python -m benchmarks.restore [--quick] [--worlds 1:1 2:3 ...]``.

Behind the shaper, so that the network is the ceiling. The limit is the same client reading the needed bytes by ranged GETs of 16 MiB with
eight threads per rank, unverified; ``restore`` verifies every byte. ``N:M`` = saved by N ranks, restored by M (FSDP2 where there are several).
Over-read = bytes that came through the shaper during the restore / bytes of the state.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.commit import behind_shaper, purge, turns_of
from benchmarks.report import Bar, report
from benchmarks.shaper import Shape, Shaper
from benchmarks.workload import Workload, gpt
from torchrelay import Checkpointer, ObjectStore, TrainingState

_RANGE = 16 * 2**20
_THREADS = 8  # as many as a rank's restore uses: the limit has as many connections as we have


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small state, three turns")
    parser.add_argument("--worlds", nargs="+", default=["1:1"], help="ranks that save : ranks that restore")
    parser.add_argument(
        "--rate-mb", type=float, default=16.0, help="of each connection, MB/s, divided by the ranks that restore"
    )
    parser.add_argument("--latency-ms", type=float, default=10.0, help="of each request, and of each reply")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bars: list[Bar] = []
    for worlds in args.worlds:
        savers, restorers = (int(number) for number in worlds.split(":"))
        # Ranks share this machine's line: the ceiling stays the network's, whatever their number.
        shape = Shape(latency_s=args.latency_ms / 1000, rate_bytes_s=1e6 * args.rate_mb / restorers)
        with behind_shaper(shape) as (store, shaper):
            size = _ranks(savers, _save, quick=args.quick)[0]
            bars += _measure(store, shaper, restorers, size=size, quick=args.quick, label=f"{savers} -> {restorers}")
            purge(store, "runs/")
    report("restore", bars, out=args.out)


def _measure(
    store: ObjectStore, shaper: Shaper, world: int, *, size: float, quick: bool, label: str
) -> tuple[Bar, Bar]:
    fetched: list[float] = []

    def restore(turn: int) -> float:
        before = shaper.passed()[1]
        seconds = max(_ranks(world, _restore, quick=quick))
        fetched.append(shaper.passed()[1] - before)
        return seconds

    calls = {"restore": restore, "raw": lambda turn: _raw_get(store, threads=_THREADS * world)}
    found = turns_of(calls, turns=3 if quick else 5)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    detail: dict[str, Any] = {
        f"{name}_s": [round(v, 3) for v in (medians[name], min(s), max(s))] for name, s in found.items()
    }
    detail["mib"] = round(size / 2**20)
    return (
        Bar(
            figure=f"{label}: restore / raw ranged GETs",
            value=medians["restore"] / medians["raw"],
            bar=1.2,
            detail=detail,
        ),
        Bar(figure=f"{label}: bytes fetched / bytes of the state", value=statistics.median(fetched) / size, bar=1.1),
    )


def _raw_get(store: ObjectStore, *, threads: int) -> float:
    """Read all packs by ranges, in parallel, into buffers that are there already."""
    ranges = [
        (item.key, start, min(_RANGE, item.size_bytes - start))
        for item in store.list("runs/bench/packs/").objects
        for start in range(0, item.size_bytes, _RANGE)
    ]
    buffers = {part: memoryview(bytearray(part[2])) for part in ranges}
    with ThreadPoolExecutor(threads) as executor:
        began = perf_counter()
        list(executor.map(lambda part: store.get(part[0], offset=part[1], into=buffers[part]), ranges))
        return perf_counter() - began


def _ranks(world: int, work: Callable[[Workload], float], *, quick: bool) -> list[float]:
    """Run ``work`` in ``world`` fresh processes; returns what each returned."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(world)]
        processes = [
            context.Process(target=_rank, args=(pipe[1], work, (rank, world), quick, f"file://{folder}/store"))
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            return [float(ours.recv()) for ours, _ in pipes]
        finally:
            for process in processes:
                process.join(60)
                process.kill()
                process.join()


def _rank(
    pipe: Connection, work: Callable[[Workload], float], place: tuple[int, int], quick: bool, meeting: str
) -> None:
    torch.set_num_threads(1)
    rank, world = place
    if world > 1:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
        workload = gpt(quick=quick, prepare=_shard)
    else:
        workload = gpt(quick=quick)
    pipe.send(work(workload))
    if world > 1:
        dist.destroy_process_group()


def _shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, nn.TransformerEncoderLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _save(workload: Workload) -> float:
    """Save once; returns the bytes of the whole state."""
    with Checkpointer(_state(workload), run="bench", store="") as checkpointer:
        checkpointer.restore()
        checkpointer.save(1).result()
    return workload.size_bytes


def _restore(workload: Workload) -> float:
    """Restore; returns its seconds."""
    with Checkpointer(_state(workload), run="bench", store="") as checkpointer:
        if dist.is_initialized():
            dist.barrier()
        began = perf_counter()
        restored = checkpointer.restore()
        seconds = perf_counter() - began
    assert restored is not None
    assert restored.step == 1
    return seconds


def _state(workload: Workload) -> TrainingState:
    return TrainingState(model=workload.model, optimizer=workload.optimizer)


if __name__ == "__main__":
    main()
