"""The rank process: ``python -m torchrelay.worker``, started by the launcher with torchrun's environment.

It builds the job, restores the checkpoint its generation begins at, trains to the stop step and exits 0; asked to stop by SIGTERM it commits
and exits 83. It dies with its launcher, and ends itself when the launcher's pulse stops: nothing may train on unobserved.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import json
import logging
import mmap
import os
import random
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from torchrelay.checkpoint.interval import Decision, IntervalTuner
from torchrelay.checkpoint.meter import IntervalMeter
from torchrelay.config import RunSpec, SaveSpec, TrainSpec, parse_spec
from torchrelay.data.loader import elastic_loader
from torchrelay.data.sampler import ElasticSampler
from torchrelay.errors import CorruptionError, TorchrelayError
from torchrelay.jobs.job import Job, JobContext, build_job
from torchrelay.launch.parent import die_with_parent
from torchrelay.segment import Progress, SegmentResult, run_segment
from torchrelay.state.capture import TrainingState
from torchrelay.state.checkpointer import Checkpointer, Restored
from torchrelay.state.pending import PendingCheckpoint
from torchrelay.state.request import GenerationRequest, emit
from torchrelay.state.rng import derive_rng

__all__ = ["EXIT_FENCED", "EXIT_PREEMPTED", "main"]

_LOG = logging.getLogger(__name__)

EXIT_PREEMPTED = 83
EXIT_FENCED = 73
PHASES = ("init", "load", "step", "save", "finish")
_EVENT_EVERY_S = 0.25


class _Reporter:
    """Keeps this rank's progress page up to date (shared memory with the launcher) and reports events from rank 0."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank, self.phase_name, self.step = rank, "init", 0
        self._last_event = 0.0
        path = folder / f"rank-{rank}.progress"
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 24)

    def progress(self) -> Progress:
        """Return the training loop's view of this."""
        return Progress(
            phase=self.phase, step=self.stepped, saved=self.saved, notice=self.notice, interval=self.interval
        )

    def phase(self, name: str, step: int) -> None:
        self.phase_name, self.step = name, step
        self._page[:] = struct.pack("<3d", PHASES.index(name), step, time.monotonic())

    def stepped(self, step: int, loss: float | None) -> None:
        now = time.monotonic()
        if self.rank == 0 and now - self._last_event >= _EVENT_EVERY_S:
            self._last_event = now
            emit("progress", step=step, loss=loss, rank=self.rank)

    def saved(self, pending: PendingCheckpoint) -> None:
        """Report the stall of a save once it is known, which is when the next optimizer step has passed the fence."""
        threading.Thread(target=self._report_stall, args=(pending,), daemon=True).start()

    def notice(self, message: str) -> None:
        if self.rank == 0:
            emit("notice", message=message)

    def interval(self, decision: Decision, state: Mapping[str, Any]) -> None:
        """Hand what the tuner knows to the launcher, which keeps the ledger; numbers short enough for one event."""
        if decision.changed:
            _LOG.info("step=%d a save every %d steps: %s", self.step, decision.interval_steps, decision.reason)
        short = {
            name: [float(f"{number:.4g}") for number in value] if isinstance(value, list) else value
            for name, value in state.items()
        }
        emit("interval", step=self.step, state=short, **dataclasses.asdict(decision))

    def _report_stall(self, pending: PendingCheckpoint) -> None:
        try:
            pending.wait_written(60.0)
        except TorchrelayError:
            return
        emit("saved", step=pending.step, state="staged", rank=self.rank, stall_s=round(pending.stall_s, 6))


def main() -> int:
    """Run this rank to its end; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    faulthandler.enable()
    die_with_parent(int(os.environ.get("TORCHRELAY_PARENT", "0")) or None)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, rank = Path(os.environ["TORCHRELAY_WORKDIR"]), int(os.environ["RANK"])
    request = GenerationRequest.read(folder)
    spec = parse_spec(request.spec)
    reporter = _Reporter(folder, rank)
    _watch_pulse(folder, limit_s=spec.faults.lease_s)
    try:
        result = _run(request, spec, reporter, stop)
    except BaseException as error:
        _write_failure(folder, reporter, error)
        _LOG.exception("rank=%d step=%d failed in phase %s", rank, reporter.step, reporter.phase_name)
        return error.exit_code if isinstance(error, TorchrelayError) else 1
    finally:
        logging.shutdown()
    return EXIT_PREEMPTED if result.preempted else 0


def _run(request: GenerationRequest, spec: TrainSpec, reporter: _Reporter, stop: threading.Event) -> SegmentResult:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reporter.phase("init", 0)
    torch.set_num_threads(spec.world.threads_per_rank)
    device = _open_device(spec.world.device)
    if world_size > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=spec.faults.collective_timeout_s))
    try:
        job = _build(spec.run, device=device, rank=rank, world_size=world_size)
        sampler = ElasticSampler(
            job.dataset_version,
            global_batch=spec.run.global_batch,
            seed=spec.run.seed,
            rank=rank,
            world_size=world_size,
        )
        model = _parallel(job.model, device, world_size)
        model.train()
        reporter.phase("load", 0)
        with Checkpointer(_state(job, sampler), run=spec.run) as checkpointer:
            restored = checkpointer.restore()
            if restored is None:
                derive_rng(spec.run.seed, step=0, rank=rank)
            _tell_start(reporter, restored)
            first_step = restored.step if restored else 0
            loader = elastic_loader(job.dataset, sampler, num_workers=spec.world.loader_workers, collate_fn=job.collate)
            result = run_segment(
                job,
                checkpointer,
                sampler,
                iter(loader),
                model=model,
                first_step=first_step,
                stop_step=max(first_step, request.stop_step),
                save=spec.save,
                progress=reporter.progress(),
                stop_requested=stop.is_set,
                device=device,
                meter=_meter(spec.save) if spec.save.auto else None,
            )
        if rank == 0:
            emit("progress", step=result.step, loss=result.loss, rank=rank)
            if job.sample is not None and result.step >= spec.run.total_steps:
                emit("sample", text=job.sample(job.model)[:600])
        return result
    finally:
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _state(job: Job, sampler: ElasticSampler) -> TrainingState:
    return TrainingState(
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        sampler=sampler,
        scaler=job.scaler,
        ema=job.ema,
        extra=job.extra,
    )


def _meter(save: SaveSpec) -> IntervalMeter:
    """Go on from what earlier generations have learnt; every rank reads the same, so that all begin with the same interval."""
    tuner = IntervalTuner(interval_steps=save.first_interval_steps, max_steps=save.max_interval_steps)
    path = Path(os.environ["TORCHRELAY_WORKDIR"]) / "interval.json"
    if path.exists():
        try:
            tuner.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        except CorruptionError as error:
            _LOG.warning("the save interval is learnt anew: %s", error)
    return IntervalMeter(tuner, now_s=time.monotonic())


def _build(run: RunSpec, *, device: torch.device, rank: int, world_size: int) -> Job:
    """Build the job with every generator seeded alike on all ranks, so that the initial weights are the same everywhere."""
    random.seed(run.seed)
    np.random.seed(run.seed % 2**32)
    torch.manual_seed(run.seed)
    context = JobContext(
        options=run.options,
        total_steps=run.total_steps,
        global_batch=run.global_batch,
        seed=run.seed,
        device=str(device),
        rank=rank,
        world_size=world_size,
    )
    return build_job(run.job, context)


def _open_device(name: str) -> torch.device:
    if name != "cuda":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def _parallel(model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
    """Wrap the model for data parallel training, in the one form that resumes bit for bit.

    DDP re-orders its gradient buckets after the first iteration of a process, and the order in which more than two ranks' gradients are added
    depends on the buckets: the first step after a resume would differ in the last bits (measured with 3 and 4 ranks). Looking for unused
    parameters switches the re-ordering off.
    """
    if world_size == 1:
        return model
    warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
    devices = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)


def _tell_start(reporter: _Reporter, restored: Restored | None) -> None:
    if restored is None:
        return
    if reporter.rank == 0:
        emit("restored", step=restored.step, size_bytes=restored.size_bytes, seconds=round(restored.seconds, 3))
    for message in restored.notices:
        reporter.notice(message)


def _watch_pulse(folder: Path, *, limit_s: float) -> None:
    """End this process when the launcher's pulse is older than the lease: a successor may be starting."""
    with (folder / "pulse").open("rb") as file:
        page = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)

    def watch() -> None:
        while time.monotonic() - struct.unpack("<d", page[:8])[0] <= limit_s:
            time.sleep(min(0.5, limit_s / 10))
        _LOG.error("the launcher's pulse stopped %.1f s ago; this rank ends itself", limit_s)
        os._exit(EXIT_FENCED)

    threading.Thread(target=watch, name="pulse", daemon=True).start()


def _write_failure(folder: Path, reporter: _Reporter, error: BaseException) -> None:
    """Leave a report for the launcher, which chooses the root cause among the ranks."""
    frames = [_frame_name(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    kind = error.kind if isinstance(error, TorchrelayError) else ""
    hint = error.hint if isinstance(error, TorchrelayError) else ""
    message = str(error.args[0]) if isinstance(error, TorchrelayError) and error.args else str(error)
    body: dict[str, Any] = {
        "error": type(error).__name__,
        "message": message[:2000],
        "kind": kind,
        "exit_code": error.exit_code if isinstance(error, TorchrelayError) else 1,
        "hint": hint,
        "frames": frames,
        "step": reporter.step,
        "phase": reporter.phase_name,
        "distributed": _is_distributed(error),
    }
    path = folder / f"rank-{reporter.rank}.failure.json"
    path.with_suffix(".tmp").write_text(json.dumps(body), encoding="utf-8")
    path.with_suffix(".tmp").rename(path)


def _frame_name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '?')}:{frame.f_code.co_name}"


def _is_distributed(error: BaseException) -> bool:
    """Whether the error came from a collective: then a peer is the cause, and this rank a victim."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "connection closed by peer", "nccl", "process group")
    )


def _end(code: int) -> NoReturn:
    """End at once when something failed: taking apart collectives whose peers are gone may hang, abort or crash, and everything is said."""
    if code in (0, EXIT_PREEMPTED):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _end(main())
