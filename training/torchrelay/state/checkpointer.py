"""Saving without stopping, and restoring exactly.

``save`` returns at once: small state is encoded in the call, parameters and optimizer moments are copied into warm shared memory while the
next forward and backward run, and a hook makes the optimizer wait for whatever is left. Hashing, uploading and committing happen
in the courier. No store call, hash or collective is made on the training thread by ``save``.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from types import TracebackType
from typing import Any

import torch

from torchrelay.checkpoint.manifest import Manifest
from torchrelay.checkpoint.reader import load_manifest, load_record, mark_damaged
from torchrelay.checkpoint.regions import read_regions
from torchrelay.config import RunSpec
from torchrelay.errors import CorruptionError, FencedError, NotFoundError, RetryableError, StateMismatchError
from torchrelay.state.capture import Instant, TrainingState
from torchrelay.state.describe import Captured, Describer
from torchrelay.state.link import CourierLink
from torchrelay.state.parts import PartTable
from torchrelay.state.pending import PendingCheckpoint
from torchrelay.state.request import emit
from torchrelay.state.restore import Targets
from torchrelay.state.rng import derive_rng
from torchrelay.state.session import Session, open_session
from torchrelay.state.shards import describe, describe_plan, plan_shard
from torchrelay.state.staging import StagingArea
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["Checkpointer", "PendingCheckpoint", "Restored"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What was restored: the step to go on from, the checkpoint's key, bytes read, seconds, and what a person should know."""

    step: int
    manifest_key: str
    size_bytes: int
    seconds: float
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    """A save whose state is held but neither described nor copied yet, unless ``captured``."""

    pending: PendingCheckpoint
    instant: Instant
    captured: Captured | None
    trace: tuple[tuple[int, float | None], ...]
    info: dict[str, Any]


class Checkpointer:
    """Saves and restores a ``TrainingState`` in one run of the store.

    Under torchrelay's launcher it joins the generation that was started for it. In a program of your own (single process, or under torchrun with a
    process group) it starts a generation itself: every rank constructs one, with the same arguments. Use it as a context manager, or call ``close``.
    ``upload_mib_s`` and ``courier_cores`` cap the courier of each rank (0: no cap). With ``partial_commits`` a checkpoint that lacks only dead ranks
    without state of their own is committed; the RNG of those ranks is then derived anew. A launcher's spec has its own values of these.

    Example:
        >>> with Checkpointer(state, run="my-run", store="file:///tmp/checkpoints") as checkpointer:
        ...     restored = checkpointer.restore()
        ...     for step in range(restored.step if restored else 0, 1000):
        ...         train_one_step()
        ...         if (step + 1) % 100 == 0:
        ...             checkpointer.save(step + 1)
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        run: RunSpec | str,
        store: str = "",
        drain_s: float = 60.0,
        upload_mib_s: float = 0.0,
        courier_cores: float = 0.0,
        partial_commits: bool = False,
    ) -> None:
        self._state = state
        caps = {"upload_mib_s": upload_mib_s, "courier_cores": courier_cores, "partial_commits": partial_commits}
        self._session: Session = open_session(run, store=store, drain_s=drain_s, caps=caps)
        self._link: CourierLink | None = None
        self._area: StagingArea | None = None
        self._layout: tuple[object, ...] = ()
        self._described = False
        self._table = PartTable(rank=self._session.rank, world_size=self._session.world_size)
        self._describer = Describer(state, self._table)
        self._pending: PendingCheckpoint | None = None
        self._open: dict[int, PendingCheckpoint] = {}  # saves whose end is not known yet
        self._uncommitted = 0  # newest step that is written but not committed
        self._fenced: FencedError | None = None
        self._committed_step = self._session.request.begin.step if self._session.request.begin else 0
        self._work: queue.SimpleQueue[_Snapshot | Captured | None] = queue.SimpleQueue()
        self._copier = threading.Thread(target=self._copy_forever, name="snapshot", daemon=True)
        self._copier.start()
        self._hooks = [optimizer.register_step_pre_hook(self._fence) for optimizer in state.optimizers()]

    @property
    def busy(self) -> bool:
        """A save is in flight: its shared memory is not free yet. ``save`` would wait for it."""
        return self._pending is not None and not self._pending.written

    @property
    def committed_step(self) -> int:
        """Newest committed step this rank knows of (exact on rank 0)."""
        return self._committed_step

    def save(
        self,
        step: int,
        *,
        trace: Iterable[tuple[int, float | None]] = (),
        info: Mapping[str, Any] | None = None,
    ) -> PendingCheckpoint:
        """Save the state after ``step`` optimizer steps. All ranks call it at the same step.

        One save is in flight: if the last one is not written yet, this waits for it first (see ``busy``). ``trace`` is (step, loss) of the
        steps that are not committed yet, kept in the manifest.

        Raises UnserialisableError naming what cannot be stored, and FencedError if a newer generation has taken over.
        """
        began = time.monotonic()
        if self._pending is not None:
            self._pending.settle()
        if self._fenced is not None:
            raise self._fenced
        instant = self._state.hold(step)
        # What cannot be stored is told at once where it can show for the first time; afterwards the description is left to the background.
        captured = None if self._described else self._describer.describe(instant)
        self._described = True
        pending = PendingCheckpoint(step, leader=self._session.rank == 0)
        self._pending = self._open[step] = pending
        self._work.put(
            _Snapshot(pending=pending, instant=instant, captured=captured, trace=tuple(trace), info=dict(info or {}))
        )
        pending.stall_s += time.monotonic() - began
        return pending

    def restore(self) -> Restored | None:
        """Load the checkpoint this generation begins at; None for a run that starts from scratch.

        Every byte is checked. A damaged checkpoint is marked and CorruptionError raised; the next generation steps back to an older one (a
        single process of its own does so by itself). Raises StateMismatchError before anything is read if the program does not fit.
        """
        while True:
            begin = self._session.request.begin
            if begin is None:
                self._warm_up(0)
                return None
            store = open_store(self._session.request.store_url)
            try:
                restored = self._load(load_manifest(store, self._session.request.run_id, begin))
            except (CorruptionError, NotFoundError) as error:
                mark_damaged(store, self._session.request.run_id, begin, str(error))
                _LOG.error("checkpoint of step %d is damaged and will be stepped over: %s", begin.step, error)
                if not self._session.step_back():
                    hint = "start again: the run continues from the checkpoint before it"
                    raise CorruptionError(f"checkpoint of step {begin.step} is damaged: {error}", hint=hint) from error
                continue
            self._warm_up(restored.step)
            return restored

    def _warm_up(self, step: int) -> None:
        """Find out now whether the state can be stored, and have the staging memory made and touched in the background."""
        captured = self._describer.capture(step)
        self._described = True
        self._work.put(captured)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait until a save in flight is complete (at most ``timeout_s``), then let the courier go."""
        try:
            if self._pending is not None and self._pending.state != "failed":
                self._pending.result(timeout_s)
        finally:
            self._work.put(None)
            self._copier.join(timeout=5.0)
            for hook in self._hooks:
                hook.remove()
            if self._link is not None:
                self._link.close()
            if self._area is not None and not self._copier.is_alive():
                self._area.close()
                self._area = None
            self._session.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(timeout_s=5.0)
        except Exception:
            # The program's own error is on its way out and must not be replaced; the courier goes on by itself.
            _LOG.warning("closing after an error", exc_info=True)

    def _load(self, manifest: Manifest) -> Restored:
        began, session = time.monotonic(), self._session
        self._state.check_fits(manifest.tensors, manifest.state)
        store = open_store(session.request.store_url)
        targets = Targets(self._state, manifest, self._table)
        near = (session.rank + 0.5) / session.world_size
        with session.sharing() as sharing:
            fetched = read_regions(store, manifest, targets.regions(), near=near, sharing=sharing)
        targets.finish()
        self._state.load(targets.trees, manifest.data)
        notices = self._load_local(store, manifest)
        return Restored(
            step=manifest.ref.step,
            manifest_key=manifest.key,
            size_bytes=fetched,
            seconds=time.monotonic() - began,
            notices=tuple(notices),
        )

    def _load_local(self, store: ObjectStore, manifest: Manifest) -> list[str]:
        """Give this rank its own state and RNG back, or derive the RNG where there is none to give; returns what a person should know."""
        session = self._session
        if manifest.world_size == session.world_size:
            lacking = "the checkpoint holds no RNG (imported, or saved by torch.distributed.checkpoint)"
            try:
                if (local := load_record(store, manifest, session.rank).local) is not None:
                    self._state.load_local(local)
                    return []
            except NotFoundError as error:
                lacking = str(error)
        else:
            lacking = f"world size changed from {manifest.world_size} to {session.world_size}"
        if self._state.per_rank:
            raise StateMismatchError(
                f"per-rank state cannot be restored: {lacking}", hint=f"start with {manifest.world_size} ranks"
            )
        derive_rng(session.seed, step=manifest.ref.step, rank=session.rank)
        return [f"{lacking}: RNG streams derived anew from (seed, step, rank)"]

    def _prepare(self, captured: Captured) -> None:
        """Have a link to the courier, and staging memory of the right layout; made again only if the state has changed shape."""
        if self._link is None:
            self._link = CourierLink(
                self._session.courier_path, on_message=self._heard, on_lost=self._session.revive_courier
            )
        layout = (captured.metas, captured.parts, captured.fixed.nodes)
        if self._area is not None and (all(map(is_, layout, self._layout)) or layout == self._layout):
            return
        session = self._session
        plan = plan_shard(captured.metas, list(captured.parts.values()), world_size=session.world_size)
        area = StagingArea(plan, captured.metas)
        head = {"tensors": describe(captured.metas), "state": captured.fixed.nodes} if session.rank == 0 else None
        fragment = captured.fixed.fragment if session.rank else None
        self._link.use_area(
            area.fd,
            area.size_bytes,
            {
                **describe_plan(plan, captured.metas),
                "world_size": session.world_size,
                "head": head,
                "fragment": fragment,
            },
        )
        if self._area is not None:
            self._area.close()
        self._area, self._layout = area, layout

    def _message(
        self, captured: Captured, step: int, trace: tuple[tuple[int, float | None], ...], info: dict[str, Any]
    ) -> dict[str, Any]:
        """Describe the snapshot to the courier. Free of clocks, so that handing it over twice writes the same bytes."""
        session = self._session
        head = None
        if session.rank == 0:
            head = Manifest(
                run_id=session.request.run_id,
                ref=session.ref(step),
                world_size=session.world_size,
                begin=session.request.begin,
                tensors={},  # these, and the fixed part of the state, came with the area
                state=captured.varying,
                data=captured.data,
                trace=trace,
                info={
                    "torch": torch.__version__,
                    "spec_digest": session.spec_digest,
                    **({"partial_commits": True} if session.request.partial_commits else {}),
                    **info,
                },
            ).head()
        return {"type": "staged", "step": step, "local": captured.local, "head": head}

    def _copy_forever(self) -> None:
        """Describe and copy each snapshot, prove that nothing moved meanwhile, and hand it to the courier."""
        while (snapshot := self._work.get()) is not None:
            if isinstance(snapshot, Captured):
                with contextlib.suppress(Exception):  # if memory is short, the save says so
                    self._prepare(snapshot)
                continue
            pending = snapshot.pending
            try:
                self._stage(snapshot)
            except Exception as error:
                _LOG.error("step=%d rank=%d save failed: %s", pending.step, self._session.rank, error)
                emit("saved", step=pending.step, state="failed", rank=self._session.rank, message=str(error)[:800])
                self._open.pop(pending.step, None)
                pending.advance("failed", error)

    def _stage(self, snapshot: _Snapshot) -> None:
        pending, captured = snapshot.pending, snapshot.captured
        if captured is None:
            captured = self._describer.describe(snapshot.instant)
        self._prepare(captured)
        assert self._area is not None
        assert self._link is not None
        self._area.copy(captured.tensors)
        snapshot.instant.check_unmoved(pending.step)
        message = self._message(captured, pending.step, snapshot.trace, snapshot.info)
        pending.advance(
            "staged"
        )  # the optimizer may go on; the staged bytes are the courier's until it has written them
        self._link.hand_over(message)

    def _fence(self, *_: Any) -> None:
        """Before an optimizer step: wait until the snapshot no longer needs the old values."""
        pending = self._pending
        if pending is None or pending.state != "staging":
            return
        began = time.monotonic()
        try:
            pending.wait_staged()
        except Exception:
            # Reported already, and to whoever asks for the result; a failed save never stops training.
            _LOG.debug("step=%d the snapshot failed", pending.step, exc_info=True)
        pending.stall_s += time.monotonic() - began

    def _tell_link(self, kind: str, step: int, pending: PendingCheckpoint | None) -> None:
        """Say what need not be handed to a new courier again, and what it should still commit."""
        if self._link is None:
            return
        if kind in ("written", "fenced") and self._pending in (pending, None):
            self._link.done()
        if kind == "written" and self._session.rank == 0:
            self._uncommitted = max(self._uncommitted, step)
        elif kind == "fenced" or (kind in ("committed", "abandoned") and step >= self._uncommitted):
            self._uncommitted = 0
        self._link.expect_commit(self._uncommitted or None)

    def _heard(self, message: dict[str, Any]) -> None:
        """Take a report of the courier (on the link's thread)."""
        kind, step = message["type"], message["step"]
        pending = self._open.get(step)
        self._tell_link(kind, step, pending)
        if kind == "committed":
            self._committed_step = max(self._committed_step, step)
            for older in [number for number in self._open if number < step]:
                # The courier commits only the newest complete one: nobody will hear of these again.
                superseded = RetryableError(f"step {older} was not committed before step {step} was")
                self._open.pop(older).advance("failed", superseded)
        elif kind == "fenced":
            self._fenced = FencedError(message["message"])
            for number in list(self._open):
                self._open.pop(number).advance("failed", self._fenced)
        elif kind == "abandoned" and pending is not None:
            pending.advance("failed", RetryableError(f"step {step} was not committed: {message['message']}"))
        if kind in ("written", "committed") and pending is not None:
            pending.advance(kind)
        if kind in ("committed", "abandoned") or (kind == "written" and self._session.rank):
            self._open.pop(step, None)
