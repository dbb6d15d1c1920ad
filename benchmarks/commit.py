"""From ``save`` to a durable checkpoint: ``python -m benchmarks.commit [--quick]``.

On a local disk beside DCP, every byte hashed by us and none by it, both synced; and on S3 (SeaweedFS behind the shaper, so that the network
and not this machine's CPU is the ceiling) beside the same client putting objects of random bytes of a pack's size with as many threads.
Nothing trains meanwhile: what a save costs training is in ``lost_time``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.engines import ENGINES, process_group
from benchmarks.report import Bar, report
from benchmarks.shaper import Shape, Shaper, shaped
from benchmarks.workload import Workload, gpt
from torchrelay import Checkpointer, ObjectStore, TrainingState, open_store
from torchrelay.testing.servers import SeaweedServer

__all__ = ["behind_shaper", "purge", "turns_of"]

_ENGINES = ("torchrelay", "dcp-kept", "dcp-staging", "dcp-process", "torch_checkpointing", "torchsnapshot")
_OBJECT = 64 * 2**20  # a full pack
_THREADS = 4  # as many as the courier uses


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small state, three turns")
    parser.add_argument("--only", choices=["file", "s3"])
    parser.add_argument("--rate-mb", type=float, default=16.0, help="of each connection, MB/s")
    parser.add_argument("--latency-ms", type=float, default=10.0, help="of each request, and of each reply")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    workload, turns = gpt(quick=args.quick), 3 if args.quick else 5
    bars: list[Bar] = []
    if args.only != "s3":
        bars += _on_files(workload, turns=turns)
    if args.only != "file":
        shape = Shape(latency_s=args.latency_ms / 1000, rate_bytes_s=1e6 * args.rate_mb)
        bars += _on_s3(workload, shape, turns=turns)
    report("commit", bars, out=args.out)


def turns_of(calls: Mapping[str, Callable[[int], float]], *, turns: int) -> dict[str, list[float]]:
    """Call each in turn, ``turns`` times and once before, which is discarded; the argument is a step that rises."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            seconds = call(turn + 1)
            if turn:
                found[name].append(seconds)
    return found


def _on_files(workload: Workload, *, turns: int) -> list[Bar]:
    with tempfile.TemporaryDirectory() as folder, process_group():
        engines = [ENGINES[name](workload, Path(folder)) for name in _ENGINES]

        def save(engine: Any, step: int) -> float:
            workload.step()  # another state every time: nothing to deduplicate
            began = perf_counter()
            engine.save(step)
            engine.join()
            engine.wait()
            seconds = float(engine.durable_at()) - began
            engine.tidy()
            return seconds

        calls: dict[str, Callable[[int], float]] = {
            engine.name: lambda step, engine=engine: save(engine, step)  # type: ignore[misc]
            for engine in engines
        }
        calls["raw"] = lambda step: _raw_file(workload, Path(folder) / "raw")
        try:
            found = turns_of(calls, turns=turns)
        finally:
            for engine in engines:
                engine.close()
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    best = min(value for name, value in medians.items() if name.startswith("dcp"))
    detail = {"mib": round(workload.size_bytes / 2**20)} | {f"{name}_s": round(v, 3) for name, v in medians.items()}
    return [
        Bar(figure="local disk: durable / DCP's best mode", value=medians["torchrelay"] / best, bar=0.5, detail=detail)
    ]


def _raw_file(workload: Workload, path: Path) -> float:
    """Write the same number of bytes from one warm buffer and sync: the floor of a single writer."""
    block = memoryview(bytearray(secrets.token_bytes(2**20) * (_OBJECT // 2**20)))
    began, left = perf_counter(), workload.size_bytes
    with path.open("wb", buffering=0) as file:
        while left:
            left -= file.write(block[: min(left, len(block))])
        os.fsync(file.fileno())
    seconds = perf_counter() - began
    path.unlink()
    return seconds


def _on_s3(workload: Workload, shape: Shape, *, turns: int) -> list[Bar]:
    with behind_shaper(shape) as (store, _):
        state = TrainingState(model=workload.model, optimizer=workload.optimizer)
        with Checkpointer(state, run="bench", store=store.url) as checkpointer:
            checkpointer.restore()

            def save(step: int) -> float:
                workload.step()
                began = perf_counter()
                checkpointer.save(step).result()
                seconds = perf_counter() - began
                purge(store, "runs/bench/packs/")
                return seconds

            found = turns_of(
                {"torchrelay": save, "raw": lambda step: _raw_put(store, workload.size_bytes)}, turns=turns
            )
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ceiling = _THREADS * shape.rate_bytes_s / 1e6
    detail = {
        "mib": round(workload.size_bytes / 2**20),
        **{f"{name}_s": [round(v, 3) for v in (medians[name], min(s), max(s))] for name, s in found.items()},
        "raw_mb_s": round(workload.size_bytes / medians["raw"] / 1e6, 1),
        "ceiling_mb_s": ceiling,
    }
    figure = "S3 behind the shaper: committed / raw parallel PUT of as many bytes"
    return [Bar(figure=figure, value=medians["torchrelay"] / medians["raw"], bar=1.15, detail=detail)]


def _raw_put(store: ObjectStore, size: int) -> float:
    """PUT ``size`` random bytes in objects of a pack's size, in parallel."""
    block = memoryview(bytearray(secrets.token_bytes(_OBJECT)))
    sizes = [min(_OBJECT, size - start) for start in range(0, size, _OBJECT)]
    with ThreadPoolExecutor(_THREADS) as executor:
        began = perf_counter()
        list(executor.map(lambda item: store.put(f"raw/{item[0]}", block[: item[1]]), enumerate(sizes)))
        seconds = perf_counter() - began
    purge(store, "raw/")
    return seconds


def purge(store: ObjectStore, prefix: str) -> None:
    """Delete all objects with a prefix."""
    keys: Sequence[str] = [item.key for item in store.list(prefix).objects]
    if keys:
        store.delete(keys)


@contextlib.contextmanager
def behind_shaper(shape: Shape) -> Iterator[tuple[ObjectStore, Shaper]]:
    """A SeaweedFS server behind a shaper; this process's environment names it, so that couriers find it too."""
    with (
        tempfile.TemporaryDirectory() as folder,
        SeaweedServer(Path(folder)) as server,
        shaped(server.endpoint, shape) as shaper,
    ):
        settings = {**server.environ("bench"), "TORCHRELAY_S3_ENDPOINT": shaper.endpoint}
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield open_store(""), shaper
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


if __name__ == "__main__":
    main()
