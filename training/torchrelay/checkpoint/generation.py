"""Starting a generation, keeping its lease, and knowing when it has been succeeded.

A generation starts by winning one ``create``. A lease tells others that it lives; it is judged by the *observer's* monotonic clock
since it last changed, so clocks are never compared between hosts. Losing the lease does not end a generation (the store may have been
away for everybody); a newer generation does.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchrelay.checkpoint.commit import finish_pending
from torchrelay.checkpoint.history import Generation, History, check_fence, read_history, successor_lineage
from torchrelay.checkpoint.host import ProcessIdentity, this_process
from torchrelay.checkpoint.layout import (
    ManifestRef,
    generation_key,
    index_prefix,
    lease_key,
    parse_run_key,
    run_key,
)
from torchrelay.checkpoint.reader import load_manifest, mark_damaged
from torchrelay.checkpoint.sealed import seal, unseal
from torchrelay.config import RunSpec
from torchrelay.errors import ConflictError, CorruptionError, NotFoundError, RunBusyError, RunMismatchError
from torchrelay.store.base import ObjectStore

__all__ = [
    "Clock",
    "GenerationClaim",
    "Lease",
    "LeaseState",
    "list_runs",
    "open_run",
    "read_lease",
    "read_run",
    "start_generation",
]

_SETTLE_S = 2.0  # without `create`, writers of one number see each other's names after this long


class Clock(Protocol):
    """Monotonic seconds and sleep; a test drives its own."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationClaim:
    """A generation that this process owns. ``fenced`` is False when the store cannot keep two apart."""

    run_id: str
    generation: int
    begin: ManifestRef | None
    fenced: bool
    notices: tuple[str, ...] = ()

    @property
    def begin_step(self) -> int:
        """Step it continues from; 0 from scratch."""
        return self.begin.step if self.begin else 0

    @property
    def begin_key(self) -> str | None:
        """Key of the manifest it begins at; None from scratch."""
        return self.begin.key(self.run_id) if self.begin else None


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseState:
    """What a lease says: the holder, a counter that rises with each renewal, and how the generation ended (if it has)."""

    generation: int
    lease_s: float
    seq: int
    step: int
    holder: ProcessIdentity | None
    outcome: dict[str, Any] | None

    @property
    def ended(self) -> bool:
        """The holder said that it is done."""
        return self.outcome is not None


def open_run(store: ObjectStore, spec: RunSpec, *, provenance: Mapping[str, Any]) -> None:
    """Create the run, or check that the existing one is the same. Raises RunMismatchError that says what differs."""
    fields = _spec_body(spec)
    body = {
        "spec": fields,
        "digest": spec.digest(),
        "provenance": dict(provenance),
        "nonce": secrets.token_hex(8),
    }
    created = store.create(run_key(spec.run_id), seal("run", body))
    there = unseal("run", created.data, where=run_key(spec.run_id))
    if there["digest"] == body["digest"]:
        return
    differs = [
        f"{name}: the run has {there['spec'].get(name)!r}, this spec has {value!r}"
        for name, value in fields.items()
        if there["spec"].get(name) != value
    ]
    raise RunMismatchError(
        f"run {spec.run_id!r} exists with another spec ({'; '.join(differs)})",
        hint="use the run's own values to continue it, or another run_id to start a new one",
    )


def list_runs(store: ObjectStore) -> list[str]:
    """Return the names of all runs, sorted."""
    names = (parse_run_key(item.key) for item in store.list(index_prefix()).objects)
    return sorted(name for name in names if name)


def read_run(store: ObjectStore, run_id: str) -> dict[str, Any]:
    """Return the run's document (spec, digest, provenance). Raises NotFoundError with a hint."""
    try:
        return unseal("run", store.get(run_key(run_id)), where=run_key(run_id))
    except NotFoundError:
        raise NotFoundError(f"there is no run {run_id!r} in {store.url}", hint="torchrelay runs lists them") from None


def _spec_body(spec: RunSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("run_id", "job", "options", "total_steps", "global_batch", "seed")}


def read_lease(store: ObjectStore, run_id: str, number: int) -> LeaseState | None:
    """Read a generation's lease; None if it never wrote one, or the object is damaged (its owner will write it again)."""
    key = lease_key(run_id, number)
    try:
        body = unseal("lease", store.get(key), where=key)
        return LeaseState(
            generation=int(body["generation"]),
            lease_s=float(body["lease_s"]),
            seq=int(body["seq"]),
            step=int(body["step"]),
            holder=ProcessIdentity.from_dict(body["holder"]),
            outcome=body["outcome"],
        )
    except (NotFoundError, CorruptionError, KeyError, TypeError, ValueError):
        return None


class Lease:
    """The lease of one generation. Only its launcher writes it, so a plain PUT is enough.

    A store outage does not end the generation: nobody else can start one meanwhile. When the store is back, ``renew`` finds out whether somebody did.
    """

    def __init__(
        self, store: ObjectStore, claim: GenerationClaim, *, lease_s: float, holder: ProcessIdentity | None = None
    ) -> None:
        self._store, self._claim, self._lease_s = store, claim, lease_s
        self._holder = holder or this_process()
        self._seq = 0

    def renew(self, *, step: int) -> None:
        """Say that the generation lives. Raises FencedError if a newer one exists, RetryableError if the store is away."""
        check_fence(self._store, self._claim.run_id, self._claim.generation)
        self._write(step=step, outcome=None)

    def end(self, outcome: Mapping[str, Any], *, step: int = 0) -> None:
        """Say that the generation is over, and how. The last write of a launcher."""
        self._write(step=step, outcome=dict(outcome))

    def _write(self, *, step: int, outcome: dict[str, Any] | None) -> None:
        self._seq += 1
        body = {
            "generation": self._claim.generation,
            "lease_s": self._lease_s,
            "seq": self._seq,
            "step": step,
            "holder": self._holder.to_dict(),
            "outcome": outcome,
        }
        self._store.put(lease_key(self._claim.run_id, self._claim.generation), seal("lease", body))


def start_generation(
    store: ObjectStore,
    run_id: str,
    *,
    info: Mapping[str, Any],
    lease_s: float,
    clock: Clock = time,
    cancelled: Callable[[], bool] = lambda: False,
) -> GenerationClaim:
    """Win the next generation of a run.

    Waits until the predecessor is known to be dead, finishes a commit that it left complete but uncommitted, picks the newest checkpoint that is
    whole, and creates the record. Raises RunBusyError if the predecessor lives or somebody else won.
    """
    capable = store.probe().create
    awaited = read_history(store, run_id)
    _await_death(store, run_id, awaited, lease_s=lease_s, clock=clock, cancelled=cancelled)
    notices = []
    finished = finish_pending(store, run_id, _still(awaited, read_history(store, run_id), run_id))
    if finished:
        notices.append(
            f"finished the commit of step {finished.step}, left complete by generation {finished.generation}"
        )
    history, found = _whole_line(store, run_id)
    notices += found
    begin = _still(awaited, history, run_id).latest
    token = "" if capable else secrets.token_hex(8)
    record = Generation(
        run_id=run_id,
        number=history.next_number,
        begin=begin,
        lineage=successor_lineage(history.newest, begin),
        nonce=secrets.token_hex(8),
        info={**info, "holder": this_process(os.getpid()).to_dict(), "started_s": time.time()},
        token=token,
    )
    if capable:
        won = store.create(record.key, record.to_bytes()).ours
    else:
        notices.append(
            "this store ignores conditional writes: nothing keeps two starts of one run apart but their timing; do not start a run twice"
        )
        store.put(record.key, record.to_bytes())
        clock.sleep(_SETTLE_S)
        rivals = store.list(generation_key(run_id, record.number).removesuffix(".json")).objects
        won = min(item.key for item in rivals) == record.key
    if not won:
        raise _beaten(run_id, record.number)
    return GenerationClaim(run_id=run_id, generation=record.number, begin=begin, fenced=capable, notices=tuple(notices))


def _still(awaited: History, now: History, run_id: str) -> History:
    """Return the history as it is now, if no generation began since the one whose end was awaited: that one lives, and must not be succeeded."""
    if now.next_number != awaited.next_number:
        raise _beaten(run_id, now.next_number - 1)
    return now


def _beaten(run_id: str, number: int) -> RunBusyError:
    return RunBusyError(f"another start of run {run_id!r} won generation {number}", hint=f"torchrelay show {run_id}")


def _await_death(
    store: ObjectStore, run_id: str, history: History, *, lease_s: float, clock: Clock, cancelled: Callable[[], bool]
) -> None:
    """Return when the newest generation is over: it said so, its process is known to be gone, or its lease stood still for its whole term."""
    number = history.next_number - 1  # the newest there ever was, even if its record cannot be read: its lease may be
    if number == 0:
        return
    known = history.newest if history.newest and history.newest.number == number else None
    holder = ProcessIdentity.from_dict(known.info.get("holder") or {}) if known else None
    first = read_lease(store, run_id, number)
    began = clock.monotonic()
    while True:
        lease = read_lease(store, run_id, number)
        if lease and lease.ended:
            return
        process = (lease.holder if lease else None) or holder
        if process and process.is_gone():
            return
        if (lease.seq if lease else 0) != (first.seq if first else 0):
            raise RunBusyError(
                f"run {run_id!r} is being trained by generation {number} on host {process.host if process else '?'} "
                f"(pid {process.pid if process else '?'})",
                hint="wait for it, or cancel that flow run, then start again",
            )
        term = max(lease.lease_s if lease else 0.0, lease_s)
        if clock.monotonic() - began > term:
            return
        if cancelled():
            raise ConflictError("stopped while waiting for the previous generation's lease to lapse")
        clock.sleep(min(0.5, term / 20))


def _whole_line(store: ObjectStore, run_id: str) -> tuple[History, list[str]]:
    """Read the history and step back over checkpoints whose manifest is damaged, marking them."""
    notices = []
    while True:
        history = read_history(store, run_id)
        notices += [f"generation record {key} is unreadable and was stepped over" for key in history.unreadable]
        if history.latest is None:
            return history, notices
        try:
            load_manifest(store, run_id, history.latest)
            return history, notices
        except (CorruptionError, NotFoundError) as error:
            mark_damaged(store, run_id, history.latest, str(error))
            notices.append(f"checkpoint of step {history.latest.step} is damaged and was stepped over: {error}")
