"""The training loop of one segment, in every rank.

All ranks decide alike, because they decide on sums: each step carries a small all-reduce (``_Tally``: loss, stop wish, busy, committed step,
interval) on a gloo group of the CPU, read one step later, or at once when a save is due. So a stop request or a slow store never makes ranks
part ways, and no rank ever waits for its courier before the loss bound is reached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchrelay.checkpoint.interval import Decision
from torchrelay.checkpoint.meter import IntervalMeter
from torchrelay.config import SaveSpec
from torchrelay.data.sampler import ElasticSampler
from torchrelay.jobs.job import Job
from torchrelay.state.checkpointer import Checkpointer
from torchrelay.state.pending import PendingCheckpoint

__all__ = ["Progress", "SegmentResult", "run_segment"]

_LOG = logging.getLogger(__name__)
_POLL_S = 0.05  # between looks while waiting for the store


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentResult:
    """How a segment ended on this rank: the step it reached (committed), and whether it was asked to stop early."""

    step: int
    preempted: bool
    loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What the loop tells the outside world; each is called on the training thread and must be quick."""

    phase: Callable[[str, int], None]
    step: Callable[[int, float | None], None]
    saved: Callable[[PendingCheckpoint], None]
    notice: Callable[[str], None]
    interval: Callable[[Decision, Mapping[str, Any]], None] = lambda _decision, _state: None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tally:
    """Sum of all ranks' votes for one step. ``loss`` is the mean over the global batch, None if it is not finite."""

    step: int
    loss: float | None
    stop: bool
    busy: bool
    committed: int
    interval: int


class _Votes:
    """One small all-reduce per step, at most one outstanding. Started and awaited on the training thread only."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        # A group of its own on the CPU: reading it never waits for a device, and it cannot mix with the job's collectives.
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None
        self._outstanding: tuple[int, torch.Tensor, Any] | None = None

    def start(
        self, step: int, *, loss_sum: float, samples: int, stop: bool, busy: bool, committed: int, interval: int
    ) -> None:
        leader = self._rank == 0  # what it alone knows travels in the sum
        values = [
            loss_sum,
            float(samples),
            float(stop),
            float(busy),
            float(leader * committed),
            float(leader * interval),
        ]
        vote = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(vote, group=self._group, async_op=True) if self._group is not None else None
        self._outstanding = (step, vote, work)

    def collect(self) -> _Tally | None:
        """Wait for the outstanding vote, if there is one."""
        if self._outstanding is None:
            return None
        step, vote, work = self._outstanding
        self._outstanding = None
        if work is not None:
            work.wait()
        loss_sum, samples, stop, busy, committed, interval = vote.tolist()
        loss = loss_sum / samples if samples else None
        finite = loss is not None and abs(loss) < float("inf")
        return _Tally(
            step=step,
            loss=loss if finite else None,
            stop=stop > 0,
            busy=busy > 0,
            committed=int(committed),
            interval=int(interval),
        )


@dataclass(kw_only=True)
class _Loop:
    job: Job
    model: nn.Module
    checkpointer: Checkpointer
    sampler: ElasticSampler
    batches: Iterator[Any]
    save: SaveSpec
    progress: Progress
    stop_requested: Callable[[], bool]
    device: torch.device
    rank: int
    world_size: int
    step: int
    votes: _Votes
    last_saved: int = 0
    committed: int = 0
    stopping: bool = False
    loss: float | None = None
    # Losses of the steps that no committed checkpoint holds yet: one that is written may still never be committed.
    trace: list[tuple[int, float | None]] = field(default_factory=list)
    traced: int = 0
    pending: PendingCheckpoint | None = None
    meter: IntervalMeter | None = None  # on rank 0, where the interval is chosen
    interval: int = 0
    gap: int = 0  # steps between the last two saves: when the interval shrinks, they are not yet overdue

    def run(self, stop_step: int) -> SegmentResult:
        while self.step < stop_step and not self.stopping:
            self.progress.phase("step", self.step)
            self._train_step()
            self._measure()
            if self.step - self.last_saved >= self.interval and self.step < stop_step:
                tally = self._collect()
                if tally and not tally.busy and not self.stopping:
                    self._save()
            self._hold_loss_bound()
        self._collect()
        self._finish()
        return SegmentResult(step=self.step, preempted=self.step < stop_step, loss=self.loss)

    def _train_step(self) -> None:
        job, optimizer, scaler = self.job, self.job.optimizer, self.job.scaler
        batch = _to_device(next(self.batches), self.device)
        optimizer.zero_grad(set_to_none=True)
        loss = job.loss(self.model, batch)
        samples = self._samples(self.step)
        # Ranks may hold unequal slices of the global batch; DDP averages over ranks, so each weighs in by its share. Exactly 1.0 when equal.
        weighted = loss * (samples * self.world_size / self.sampler.global_batch)
        if scaler is not None:
            scaler.scale(weighted).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
        else:
            weighted.backward()  # type: ignore[no-untyped-call]
        if job.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), job.max_grad_norm)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if job.scheduler is not None:
            job.scheduler.step()
        if job.update_ema is not None:
            job.update_ema()
        self._collect()
        self.step += 1
        self._vote(loss_sum=float(loss.detach()) * samples, samples=samples)

    def _samples(self, step: int) -> int:
        batch, rank, world = self.sampler.global_batch, self.rank, self.world_size
        return (rank + 1) * batch // world - rank * batch // world

    def _vote(self, *, loss_sum: float = 0.0, samples: int = 0) -> None:
        self.votes.start(
            self.step,
            loss_sum=loss_sum,
            samples=samples,
            stop=self.stop_requested(),
            busy=self.checkpointer.busy,
            committed=self.checkpointer.committed_step,
            interval=self.meter.interval_steps if self.meter is not None else self.interval,
        )

    def _measure(self) -> None:
        """Tell the meter that a step has ended, and the world what it made of it. Takes microseconds."""
        if self.meter is None or not self.meter.stepped(time.monotonic(), committed=self.checkpointer.committed_step):
            return
        decision = self.meter.decide()
        self.progress.interval(decision, self.meter.state_dict())

    def _collect(self) -> _Tally | None:
        tally = self.votes.collect()
        if tally is None:
            return None
        self.committed = max(self.committed, tally.committed)
        self.stopping = self.stopping or tally.stop
        self.interval = tally.interval
        if tally.step > self.traced:
            self.traced, self.loss = tally.step, tally.loss
            self.trace.append((tally.step, tally.loss))
            self.progress.step(tally.step, tally.loss)
        return tally

    def _agree(self) -> _Tally:
        """Vote and wait for the answer, outside of a step."""
        self._collect()
        self._vote()
        tally = self._collect()
        assert tally is not None
        return tally

    def _save(self) -> None:
        self.progress.phase("save", self.step)
        self.trace = [point for point in self.trace if point[0] > self.committed]
        self.pending = self.checkpointer.save(self.step, trace=self.trace)
        self.gap, self.last_saved = self.step - self.last_saved, self.step
        if self.meter is not None:
            self.meter.saved(self.pending, time.monotonic())
        self.progress.saved(self.pending)

    def _hold_loss_bound(self) -> None:
        """Wait for the store when too many steps are not committed: a failure now would lose them all."""
        if not self._over_bound():
            return
        self._agree()
        if not self._over_bound():
            return
        self.progress.phase("save", self.step)
        self.progress.notice(
            f"training waits for the store: step {self.step}, but only step {self.committed} is committed"
        )
        while self._over_bound() and not self.stopping:
            tally = self._agree()
            if not tally.busy and self.last_saved < self.step:
                self._save()
            time.sleep(_POLL_S)
        self.progress.notice(f"training goes on: step {self.committed} is committed")

    def _over_bound(self) -> bool:
        return self.step - self.committed >= self.save.bound_steps(max(self.interval, self.gap))

    def _finish(self) -> None:
        """Save the last step if it is not yet saved, and stay until it is committed."""
        self.progress.phase("finish", self.step)
        while self._agree().busy:
            time.sleep(_POLL_S)
        if self.last_saved < self.step:
            self._save()
        wait_s = 0.002
        while self._agree().committed < self.step:
            failed = self.pending is not None and self.pending.state == "failed"
            if failed and self.pending is not None:
                self.pending.result()
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _POLL_S)


def run_segment(
    job: Job,
    checkpointer: Checkpointer,
    sampler: ElasticSampler,
    batches: Iterator[Any],
    *,
    model: nn.Module,
    first_step: int,
    stop_step: int,
    save: SaveSpec,
    progress: Progress,
    stop_requested: Callable[[], bool],
    device: torch.device,
    meter: IntervalMeter | None = None,
) -> SegmentResult:
    """Train from ``first_step`` to ``stop_step`` and commit the last step; sooner if any rank is asked to stop.

    ``model`` is the job's model as it is trained (wrapped by DDP when there are several ranks). ``meter`` chooses the interval where ``save``
    leaves it open; rank 0's is the one that counts. Raises what the job raises, FencedError when a
    newer generation has taken over, and the process group's errors when a peer is gone.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loop = _Loop(
        job=job,
        model=model,
        checkpointer=checkpointer,
        sampler=sampler,
        batches=batches,
        save=save,
        progress=progress,
        stop_requested=stop_requested,
        device=device,
        rank=rank,
        world_size=world_size,
        step=first_step,
        votes=_Votes(rank, world_size),
        last_saved=first_step,
        committed=first_step,
        traced=first_step,
        meter=meter if rank == 0 else None,
        interval=meter.interval_steps if meter is not None else save.first_interval_steps,
    )
    return loop.run(stop_step)


def _to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors of a batch; on the CPU it is returned as it is."""
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device) for item in value)
    return value
