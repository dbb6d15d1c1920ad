"""What every object under a run is for: live, forgotten, debris or unknown.

A pack or record lies under the name of the checkpoint that wrote it, and is judged by that; a pack is live as well while any live record names it.
Nothing here is a guess: what follows no rule of the format is unknown and left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain as joined
from typing import Literal

from torchrelay.checkpoint.history import History, chain, read_history
from torchrelay.checkpoint.layout import (
    ManifestRef,
    parse_generation_key,
    parse_interval_ledger_key,
    parse_lease_key,
    parse_manifest_key,
    parse_mark_key,
    parse_pack_key,
    parse_record_key,
    run_key,
    run_prefix,
)
from torchrelay.checkpoint.manifest import RecordSummary
from torchrelay.checkpoint.reader import load_manifest
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.base import ObjectInfo, ObjectStore

__all__ = ["Finding", "Status", "Survey", "take_survey"]

Status = Literal["live", "forgotten", "debris", "unknown"]
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One object, what kind it is, what it is for, and the checkpoint it belongs to, if any."""

    info: ObjectInfo
    kind: str
    status: Status
    why: str
    ref: ManifestRef | None = None


@dataclass(kw_only=True, slots=True)
class Survey:
    """All objects of a run, and what is wrong: live objects that are ``missing`` (or of another size), and documents that are ``unreadable``.

    While a live document is unreadable nobody can know which packs it needs.
    """

    run_id: str
    server_time_s: float
    findings: list[Finding]
    missing: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def of(self, *statuses: Status) -> Iterator[Finding]:
        """The findings of these kinds."""
        return (finding for finding in self.findings if finding.status in statuses)


def take_survey(store: ObjectStore, run_id: str) -> Survey:
    """Look at every object of a run; changes nothing, and may run beside training.

    The history is read before the listing: whatever a save writes or commits in between is then part of a save in progress.
    """
    history = read_history(store, run_id)
    listing = store.list(run_prefix(run_id))
    index = [item for item in store.list(run_key(run_id)).objects if item.key == run_key(run_id)]
    survey = Survey(
        run_id=run_id, server_time_s=listing.server_time_s, findings=[], unreadable=list(history.unreadable)
    )
    judge = _Judge(history, listing.objects)
    there = {item.key: item.size_bytes for item in listing.objects}
    named = _named_packs(store, survey, judge, there)
    for item in (*index, *listing.objects):
        finding = judge.look(item) if item.key != run_key(run_id) else Finding(item, "run", "live", "names the run")
        if item.key in named and finding.status != "live":
            finding = Finding(item, "pack", "live", "named by a live record of a later checkpoint", finding.ref)
        survey.findings.append(finding)
    # Once more: a pack may have come after the listing, and its record before it was read.
    survey.missing += [
        key
        for key, size in named.items()
        if there.get(key) != size and [item.size_bytes for item in store.list(key).objects if item.key == key] != [size]
    ]
    survey.missing.sort()
    return survey


class _Judge:
    """Knows what became of each checkpoint of the run."""

    def __init__(self, history: History, objects: Iterable[ObjectInfo]) -> None:
        keys = [item.key for item in objects]
        self.manifests = {ref for key in keys if (ref := parse_manifest_key(key))}
        self.line = frozenset(chain(history.newest, {*history.line, *self.manifests}))
        marks = [mark for key in keys if (mark := parse_mark_key(key))]
        self._forgotten = {ref for folder, ref in marks if folder == "forgotten"} - self.manifests
        self._pinned = {ref for folder, ref in marks if folder == "pins"} & self.manifests
        self._number = history.next_number - 1
        begin = history.newest.begin_step if history.newest else 0
        own = [ref.step for ref in self.line if ref.generation == self._number]
        self._floor = max([begin, *own])

    def of(self, ref: ManifestRef) -> tuple[Status, str]:
        """Judge a checkpoint, and with it what it wrote."""
        if ref in self.line:
            return "live", "of a checkpoint on the line"
        if ref in self._pinned:
            return "live", "of a pinned checkpoint"
        if ref.generation > self._number or (ref.generation == self._number and ref.step > self._floor):
            return "live", "of a save that may be in progress"
        if ref in self.manifests:
            return "debris", "of a checkpoint that the run stepped back over: it counts for nobody"
        if ref in self._forgotten:
            return "forgotten", "of a forgotten checkpoint"
        return "debris", "of a save that was never committed"

    def look(self, item: ObjectInfo) -> Finding:
        """Say what an object is."""
        key = item.key
        mark, record = parse_mark_key(key), parse_record_key(key)
        owned = (
            ("manifest", parse_manifest_key(key)),
            ("record", record[0] if record else None),
            ("pack", parse_pack_key(key)),
            ("mark", mark[1] if mark and mark[0] != "forgotten" else None),
        )
        for kind, ref in owned:
            if ref is not None:
                return Finding(item, kind, *self.of(ref), ref)
        if mark:
            return Finding(item, "losses", "live", "losses of a forgotten checkpoint", mark[1])
        for kind, found, why in (
            ("generation", parse_generation_key(key), "history of the run"),
            ("lease", parse_lease_key(key), "life and end of a generation"),
            ("ledger", parse_interval_ledger_key(key), "save intervals and their reasons"),
        ):
            if found is not None:
                return Finding(item, kind, "live", why)
        return Finding(item, "?", "unknown", "no key of this format; never touched")


def _named_packs(store: ObjectStore, survey: Survey, judge: _Judge, sizes: Mapping[str, int]) -> dict[str, int]:
    """Size by key of every pack that a live record names. Notes what cannot be read or is missing."""
    records: dict[ManifestRef, list[str]] = defaultdict(list)
    for key in sizes:
        if (parsed := parse_record_key(key)) and judge.of(parsed[0])[0] == "live":
            records[parsed[0]].append(key)
    live = sorted({*records, *(ref for ref in judge.manifests if judge.of(ref)[0] == "live")})
    named: dict[str, int] = {}
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="survey") as executor:
        wanted = executor.map(lambda ref: _records_of(store, survey, ref, records.get(ref, [])), live)
        summaries = executor.map(
            lambda key: _look(store, survey, key, there=key in sizes), joined.from_iterable(wanted)
        )
        for summary in summaries:
            if summary is not None:
                named.update(zip(summary.pack_keys(), (pack.size_bytes for pack in summary.packs), strict=True))
    return named


def _records_of(store: ObjectStore, survey: Survey, ref: ManifestRef, there: list[str]) -> list[str]:
    """Keys of a checkpoint's records: those its manifest names, or, while it has none, those that are there."""
    try:
        return load_manifest(store, survey.run_id, ref).record_keys()
    except NotFoundError:
        return there
    except CorruptionError:
        survey.unreadable.append(ref.key(survey.run_id))
        return there


def _look(store: ObjectStore, survey: Survey, key: str, *, there: bool) -> RecordSummary | None:
    for _ in range(2):
        try:
            return RecordSummary.parse(store.get(key), where=key)[0]
        except NotFoundError:
            there = False
        except CorruptionError:
            continue
    (survey.unreadable if there else survey.missing).append(key)
    return None
