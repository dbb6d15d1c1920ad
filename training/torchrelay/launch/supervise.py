"""One generation from the request to the outcome: win it, keep its lease, run the gang, say how it ended."""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.generation import GenerationClaim, Lease, open_run, start_generation
from torchrelay.config import TrainSpec, parse_spec, spec_to_dict
from torchrelay.errors import ConfigError, ConflictError, FencedError, RetryableError, TorchrelayError
from torchrelay.launch.classify import Cause
from torchrelay.launch.gang import Gang, GangCommands
from torchrelay.launch.ledger import IntervalLedger
from torchrelay.relay import Outcome, read_status
from torchrelay.state.request import GenerationRequest
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["LaunchRequest", "main", "supervise"]

_LOG = logging.getLogger(__name__)
_KEEP_FOLDER = frozenset({"exception", "startup", "oom"})
_TAIL_LINES = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRequest:
    """What the parent asks for."""

    spec: TrainSpec
    stop_step: int
    origin: str
    why: str


@dataclass(kw_only=True)
class _Figures:
    """Collected from the children's events."""

    stall_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    committed: int = 0

    def take(self, event: dict[str, Any]) -> dict[str, Any]:
        """Note what an event says, and hand it on."""
        if event.get("event") != "saved":
            return event
        if event.get("state") == "staged":
            self.stall_s.append(float(event.get("stall_s", 0.0)))
        if event.get("state") == "written":
            self.save_s.append(float(event.get("save_s", 0.0)))
        if event.get("state") == "committed":
            self.committed += 1
        return event

    def stats(self, first_step_s: float | None) -> dict[str, float]:
        found: dict[str, float] = {"commits": float(self.committed)}
        if first_step_s is not None:
            found["first_step_s"] = round(first_step_s, 3)
        if self.stall_s:
            found |= {"stall_s_median": statistics.median(self.stall_s), "stall_s_max": max(self.stall_s)}
        if self.save_s:
            found["save_s_median"] = statistics.median(self.save_s)
        return found


class _Keeper:
    """Keeps the lease from a thread, so that a slow store never delays the watch over the gang; and the pulse from the watch itself."""

    def __init__(
        self, lease: Lease, *, lease_s: float, folder: Path, step: Callable[[], int], notice: Callable[[str], None]
    ) -> None:
        self._lease, self._lease_s, self._step, self._notice = lease, lease_s, step, notice
        self._wake, self._closing = threading.Event(), False
        self._fenced: str | None = None
        self._doubt = False
        self._last_tick = time.monotonic()
        (folder / "pulse").write_bytes(struct.pack("<d", self._last_tick))
        with (folder / "pulse").open("r+b") as file:
            self._pulse = mmap.mmap(file.fileno(), 8)
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def tick(self) -> str | None:
        """Beat the pulse; returns a reason to end the gang at once, or None.

        After a pause longer than the lease (SIGSTOP, a suspended machine) the pulse stays still until the lease has been renewed: somebody may have
        taken over meanwhile.
        """
        now = time.monotonic()
        if now - self._last_tick > self._lease_s:
            self._doubt = True
            self._wake.set()
        self._last_tick = now
        if not self._doubt:
            self._pulse[:] = struct.pack("<d", now)
        return self._fenced

    def close(self) -> None:
        """Stop renewing."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=30.0)

    def _run(self) -> None:
        quiet = True
        while not self._closing:
            try:
                self._lease.renew(step=self._step())
                self._doubt, quiet = False, True
            except FencedError as error:
                self._fenced = str(error)
                return
            except TorchrelayError as error:
                if quiet:
                    self._notice(f"the lease could not be renewed: {error}; training goes on")
                quiet = False
            self._wake.wait(self._lease_s / 4)
            self._wake.clear()


def main() -> int:
    """Serve one request on stdin; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        body = json.loads(sys.stdin.buffer.readline())
        request = LaunchRequest(
            spec=parse_spec(body["spec"]),
            stop_step=int(body["stop_step"]),
            origin=str(body["origin"]),
            why=str(body["why"]),
        )
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        _LOG.error("not a launch request: %s", error)
        return ConfigError.exit_code
    threading.Thread(target=_watch_parent, args=(stop,), name="parent", daemon=True).start()
    outcome = supervise(request, emit=_print_event, stop_requested=stop.is_set)
    _print_event({"event": "outcome", **outcome.to_dict()})
    return 0 if outcome.kind in ("completed", "preempted") else _exit_code(outcome.kind)


def supervise(
    request: LaunchRequest,
    *,
    emit: Callable[[dict[str, Any]], None],
    stop_requested: Callable[[], bool],
    commands: GangCommands | None = None,
) -> Outcome:
    """Run one generation to its end and return how it ended; never raises for what the run, the store or the job does."""
    began, faults = time.monotonic(), request.spec.faults
    try:
        store = open_store(request.spec.store)
        open_run(store, request.spec.run, provenance={"python": sys.version.split()[0], "host": _host()})
        info = {"host": _host(), "origin": request.origin, "why": request.why, "world_size": request.spec.world.ranks}
        claim = start_generation(
            store, request.spec.run.run_id, info=info, lease_s=faults.lease_s, cancelled=stop_requested
        )
    except TorchrelayError as error:
        return _not_started(request, error)
    folder = Path(tempfile.mkdtemp(prefix=f"torchrelay-{request.spec.run.run_id[:40]}-g{claim.generation}-"))
    emit(
        {
            "event": "generation",
            "generation": claim.generation,
            "begin_step": claim.begin_step,
            "world_size": request.spec.world.ranks,
            "workdir": str(folder),
        }
    )
    for notice in claim.notices:
        emit({"event": "notice", "message": notice})
    return _run_claim(
        request, claim, store, folder, emit=emit, stop_requested=stop_requested, commands=commands, began=began
    )


def _run_claim(
    request: LaunchRequest,
    claim: GenerationClaim,
    store: ObjectStore,
    folder: Path,
    *,
    emit: Callable[[dict[str, Any]], None],
    stop_requested: Callable[[], bool],
    commands: GangCommands | None,
    began: float,
) -> Outcome:
    spec, figures = request.spec, _Figures()
    _as_seen_by_processes(request, claim, store).write(folder)
    ledger = None
    if spec.save.auto:
        ledger = IntervalLedger(store, spec.run.run_id, claim.generation, folder=folder, emit=emit)
    gang = Gang(
        spec=spec,
        generation=claim.generation,
        folder=folder,
        on_event=lambda event: None if ledger and ledger.take(event) else emit(figures.take(event)),
        tick=lambda: keeper.tick(),  # noqa: PLW0108 - the keeper is made after the gang it reports on
        stop_requested=stop_requested,
        commands=commands or GangCommands(),
    )
    lease = Lease(store, claim, lease_s=spec.faults.lease_s)
    keeper = _Keeper(
        lease,
        lease_s=spec.faults.lease_s,
        folder=folder,
        step=lambda: gang.last_step,
        notice=lambda message: emit({"event": "notice", "message": message}),
    )
    try:
        cause = gang.run()
    finally:
        keeper.close()
        if ledger is not None:
            ledger.close()
    stats = {**figures.stats(gang.first_step_s), "wall_s": round(time.monotonic() - began, 3)}
    outcome = _outcome(request, claim, store, folder, cause, last_step=gang.last_step, stats=stats)
    if cause.kind != "fenced":
        _record_end(lease, outcome, emit)
    if outcome.kind not in _KEEP_FOLDER:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def _as_seen_by_processes(request: LaunchRequest, claim: GenerationClaim, store: ObjectStore) -> GenerationRequest:
    spec = request.spec
    return GenerationRequest(
        run_id=spec.run.run_id,
        generation=claim.generation,
        begin_key=claim.begin_key,
        store_url=store.url,
        spec=spec_to_dict(spec),
        stop_step=request.stop_step,
        drain_s=spec.faults.drain_s,
        upload_mib_s=spec.save.upload_mib_s,
        courier_cores=spec.save.courier_cores,
        partial_commits=spec.save.partial_commits,
    )


def _record_end(lease: Lease, outcome: Outcome, emit: Callable[[dict[str, Any]], None]) -> None:
    """Write the outcome into the lease, so that a successor waits for nobody; without it, the lease runs out."""
    try:
        lease.end(outcome.to_dict(), step=outcome.last_step)
    except TorchrelayError as error:
        message = f"the end of generation {outcome.generation} could not be recorded: {error}"
        emit({"event": "notice", "message": message})


def _outcome(
    request: LaunchRequest,
    claim: GenerationClaim,
    store: ObjectStore,
    folder: Path,
    cause: Cause,
    *,
    last_step: int,
    stats: dict[str, float],
) -> Outcome:
    message = cause.message
    try:
        committed = read_status(store, request.spec.run.run_id).committed_step
    except TorchrelayError as error:
        committed = claim.begin_step
        message += f"\nthe store could not be asked for the last commit: {error}"
    if cause.kind in _KEEP_FOLDER:
        message += f"\nlogs: {folder}" + _tail(folder, cause.rank)
    return Outcome(
        kind=cause.kind,
        generation=claim.generation,
        begin_step=claim.begin_step,
        last_step=max(last_step, claim.begin_step),
        committed_step=committed,
        message=message,
        hint=cause.hint,
        fingerprint=cause.fingerprint,
        rank=cause.rank,
        stats=stats,
    )


def _not_started(request: LaunchRequest, error: TorchrelayError) -> Outcome:
    """Describe a generation that never was. The step that is committed is unknown here, so nothing is claimed."""
    kind = (
        "store" if isinstance(error, RetryableError) else "conflict" if isinstance(error, ConflictError) else "config"
    )
    message = str(error.args[0]) if error.args else str(error)
    return Outcome(
        kind=kind, generation=0, begin_step=0, last_step=0, committed_step=0, message=message, hint=error.hint
    )


def _tail(folder: Path, rank: int | None) -> str:
    path = folder / f"rank-{rank if rank is not None else 0}.log"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return ""
    return "\n" + "\n".join(f"  | {line[:200]}" for line in lines) if lines else ""


def _watch_parent(stop: threading.Event) -> None:
    """Wait for the end of stdin: the parent is gone, however it went."""
    while os.read(0, 4096):
        pass
    stop.set()


def _print_event(event: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        # Nobody listens any more; the end of stdin says the same, and is acted on.
        return


def _exit_code(kind: str) -> int:
    return {"config": ConfigError.exit_code, "conflict": ConflictError.exit_code, "fenced": FencedError.exit_code}.get(
        kind, 1
    )


def _host() -> str:
    return os.environ.get("TORCHRELAY_HOST") or socket.gethostname()
