"""The page of a run in Prefect, kept up to date on a best-effort basis.

A background thread with a bounded queue and a time limit per call does all of it, from what the object store says. A server or store that is slow
or away costs reports, which are counted; it never blocks, delays or fails a segment.
"""

from __future__ import annotations

import contextvars
import hashlib
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks.charts import data_uri, line_chart
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.reader import load_manifest
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.relay import GenerationSummary, RunStatus, read_status
from torchrelay.store.base import ObjectStore

__all__ = ["Reporter", "RunPage", "artifact_key"]

_LOG = logging.getLogger(__name__)
_SHOWN = 20  # newest checkpoints in the table

Report = Callable[[SyncPrefectClient], None]


class Reporter:
    """Hands reports to a background thread: ``submit`` returns at once, and drops the report if too many are waiting.

    ``limit_s`` bounds each phase (connect, send, receive) of each call to the server; there is no retry. ``dropped`` and ``failed``
    count what got lost.
    """

    def __init__(self, *, limit_s: float = 5.0, capacity: int = 16) -> None:
        self.dropped = self.failed = self.delivered = 0
        self._limit_s = limit_s
        self._reports: queue.Queue[Report | None] = queue.Queue(capacity)
        self._closing = threading.Event()
        # The caller's context carries Prefect's settings (and a test's temporary ones) into the thread.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="reporter", daemon=True)
        self._thread.start()

    def submit(self, report: Report) -> bool:
        """Queue a report; False if it was dropped. Never blocks, never raises."""
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Deliver what is waiting for at most ``timeout_s``, then give up. True if everything was tried."""
        self._closing.set()
        try:
            self._reports.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        # Prefect's client would retry for a minute; a report is not worth that, and the next one says more.
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            while (report := self._reports.get()) is not None:
                try:
                    with get_client(sync_client=True, httpx_settings={"timeout": self._limit_s}) as client:
                        report(client)
                    self.delivered += 1
                except Exception as error:  # whatever it is, it must not reach the training
                    self.failed += 1
                    level = logging.WARNING if self.failed == 1 else logging.DEBUG
                    _LOG.log(level, "a report was lost (%d so far), training goes on: %r", self.failed, error)


@dataclass(kw_only=True)
class RunPage:
    """One markdown artifact per run: loss chart, generations and how they ended, checkpoints. Redrawn from the store."""

    store: ObjectStore
    run_id: str
    flow_run_id: UUID | None
    reporter: Reporter
    _artifact: UUID | None = None
    _waiting: threading.Event = field(default_factory=threading.Event)
    # Manifests never change: each is read once.
    _known: dict[ManifestRef, _Checkpoint | None] = field(default_factory=dict)

    def refresh(self) -> None:
        """Ask for the page to be redrawn soon. Requests made before that happens are one."""
        if not self._waiting.is_set():
            self._waiting.set()
            if not self.reporter.submit(self._publish):
                self._waiting.clear()

    def _publish(self, client: SyncPrefectClient) -> None:
        self._waiting.clear()
        text = self.draw()
        if self._artifact is None:
            created = ArtifactCreate(
                key=artifact_key(self.run_id),
                type="markdown",
                description=f"Run {self.run_id}: loss, generations, checkpoints",
                data=text,
                flow_run_id=self.flow_run_id,
            )
            self._artifact = client.create_artifact(created).id
        else:
            client.update_artifact(self._artifact, ArtifactUpdate(data=text))

    def draw(self) -> str:
        """Read the store and return the page as markdown."""
        status = read_status(self.store, self.run_id)
        history = read_history(self.store, self.run_id)
        refs = sorted({*history.line, *history.damaged})
        rows = [_Row(ref=ref, damaged=ref in history.damaged, checkpoint=self._checkpoint(ref)) for ref in refs]
        return _page(self.run_id, status, rows)

    def _checkpoint(self, ref: ManifestRef) -> _Checkpoint | None:
        if ref not in self._known:
            try:
                manifest = load_manifest(self.store, self.run_id, ref)
            except (CorruptionError, NotFoundError):
                return None
            self._known[ref] = _Checkpoint(
                size_bytes=manifest.size_bytes, world_size=manifest.world_size, trace=manifest.trace
            )
        return self._known[ref]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checkpoint:
    size_bytes: int
    world_size: int
    trace: tuple[tuple[int, float | None], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    ref: ManifestRef
    damaged: bool
    checkpoint: _Checkpoint | None


def artifact_key(run_id: str) -> str:
    """Name of the run's page: only letters, digits and dashes are allowed, so other names get a suffix that keeps them apart."""
    slug = re.sub(r"[^a-z0-9]+", "-", run_id).strip("-")
    digest = hashlib.sha256(run_id.encode()).hexdigest()[:8]
    return f"run-{slug}" if slug == run_id else f"run-{slug}-{digest}"


def _page(run_id: str, status: RunStatus, rows: Sequence[_Row]) -> str:
    trace: dict[int, float | None] = {}
    for row in rows:
        if row.checkpoint and not row.damaged:
            trace.update(row.checkpoint.trace)
    points = sorted(trace.items())
    last = next((value for _, value in reversed(points) if value is not None), None)
    of = f" of {status.total_steps}" if status.total_steps else ""
    head = f"Step **{status.committed_step}{of}** is committed" + (f"; loss {last:.4g}." if last is not None else ".")
    chart = line_chart(points, marks=[item.begin_step for item in status.generations if item.begin_step])
    return "\n".join(
        [
            f"# Run {run_id}",
            "",
            head + (" **Finished.**" if status.finished else ""),
            "",
            f"![loss by step]({data_uri(chart)})",
            "",
            "## Generations",
            "",
            *_table(
                ["#", "started (UTC)", "host", "began at", "reached", "ended", "why"],
                [_generation(item) for item in reversed(status.generations)],
            ),
            "",
            "## Checkpoints",
            "",
            *_table(
                ["step", "generation", "ranks", "size", "loss", "state"],
                [_checkpoint_cells(row) for row in reversed(rows[-_SHOWN:])],
            ),
            "",
            f"{len(rows)} in all; `torchrelay checkpoints {run_id}` lists them.",
        ]
    )


def _generation(item: GenerationSummary) -> list[str]:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(item.started_s))
    outcome = item.outcome
    reached = str(outcome.last_step) if outcome else ""
    message = outcome.message.splitlines()[0][:160] if outcome and outcome.message else ""
    ended = f"{outcome.kind}{': ' + message if message else ''}" if outcome else "running, or fell without a word"
    return [str(item.number), started, item.host, str(item.begin_step), reached, ended, item.why]


def _checkpoint_cells(row: _Row) -> list[str]:
    state = "damaged" if row.damaged else ("committed" if row.checkpoint else "unreadable")
    if row.checkpoint is None:
        return [str(row.ref.step), str(row.ref.generation), "", "", "", state]
    trace = row.checkpoint.trace
    loss = f"{trace[-1][1]:.4g}" if trace and trace[-1][1] is not None else ""
    size = f"{row.checkpoint.size_bytes / 2**20:.1f} MiB"
    return [str(row.ref.step), str(row.ref.generation), str(row.checkpoint.world_size), size, loss, state]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(re.sub(r"[|\r\n]+", " ", cell) for cell in cells) + " |"

    return [line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)]
