"""Reading checkpoints: every byte that is used is hashed first.

A damaged checkpoint is reported and marked, and the caller steps back to an older one; it is never deleted here. One second reading
is allowed before damage is declared, so that a bit flipped on the wire does not cost a good checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from torchrelay.checkpoint.cover import check_cover
from torchrelay.checkpoint.history import chain, read_history
from torchrelay.checkpoint.layout import ManifestRef, damage_key, record_key
from torchrelay.checkpoint.manifest import Chunk, Manifest, RecordSummary, ShardRecord
from torchrelay.checkpoint.marks import (
    clear_verified,
    list_forgotten,
    list_pins,
    list_verified,
    mark_verified,
    read_forgotten,
)
from torchrelay.checkpoint.pack import problem_of_pack
from torchrelay.checkpoint.sealed import seal
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.base import ObjectStore

__all__ = [
    "CheckpointRow",
    "clear_damage",
    "list_checkpoints",
    "load_manifest",
    "load_record",
    "load_records",
    "loss_trace",
    "mark_damaged",
    "verify_and_mark",
    "verify_checkpoint",
]

_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    """One line of the table of checkpoints. ``size_bytes`` is the size of all tensors; ``manifest`` is None if it cannot be read."""

    ref: ManifestRef
    damaged: bool
    manifest: Manifest | None
    verified: bool = False
    pinned: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors; 0 if unreadable."""
        return self.manifest.size_bytes if self.manifest else 0


def load_manifest(store: ObjectStore, run_id: str, ref: ManifestRef) -> Manifest:
    """Read one manifest. Raises NotFoundError or CorruptionError."""
    key = ref.key(run_id)
    try:
        return Manifest.from_bytes(store.get(key), where=key)
    except CorruptionError:
        return Manifest.from_bytes(store.get(key), where=key)


def load_records(store: ObjectStore, manifest: Manifest, *, executor: Executor) -> list[ShardRecord]:
    """Read the shard records a manifest names, in rank order, checking their digests."""
    return list(executor.map(lambda record: load_record(store, manifest, record.rank), manifest.records))


def load_record(store: ObjectStore, manifest: Manifest, rank: int) -> ShardRecord:
    """Read one rank's record of a checkpoint. Raises CorruptionError if it is not what the manifest names, NotFoundError if it names none."""
    ref = next((record for record in manifest.records if record.rank == rank), None)
    if ref is None:
        raise NotFoundError(f"rank {rank} had died before it wrote its record of {manifest.key}")
    key = record_key(manifest.run_id, manifest.ref, rank, manifest.world_size)
    for _ in range(2):
        try:
            data = store.get(key)
        except NotFoundError:
            raise CorruptionError(f"{key} is missing") from None
        if len(data) == ref.size_bytes:
            with contextlib.suppress(CorruptionError):
                if RecordSummary.parse(data, where=key)[0].sha256 == ref.sha256:
                    return ShardRecord.from_bytes(data, where=key)
    raise CorruptionError(f"{key} does not match the digest in its manifest")


def verify_checkpoint(store: ObjectStore, run_id: str, ref: ManifestRef) -> tuple[Manifest, int]:
    """Read back a whole checkpoint and check every hash and the cover; returns its manifest and the bytes read. Raises CorruptionError."""
    try:
        manifest = load_manifest(store, run_id, ref)
    except NotFoundError:
        raise CorruptionError(f"{ref.key(run_id)} is missing") from None
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as executor:
        records = load_records(store, manifest, executor=executor)
        check_cover(manifest.tensors, records)
        packs = [(record, number) for record in records for number in range(len(record.packs))]
        fetched = sum(executor.map(lambda pack: _verify_pack(store, *pack), packs))
    return manifest, fetched


def _verify_pack(store: ObjectStore, record: ShardRecord, number: int) -> int:
    """Hash a whole pack, then compare the chunks the record has in it; returns its size."""
    info = record.packs[number]
    key = record.pack_keys()[number]
    chunks = [chunk for box in record.boxes for chunk in box.chunks if chunk.pack == number]
    problem = ""
    for _ in range(2):
        try:
            data = store.get(key)
        except NotFoundError:
            raise CorruptionError(f"{key} is missing") from None
        problem = problem_of_pack(data, info) or _problem_of_chunks(data, chunks)
        if not problem:
            return len(data)
    raise CorruptionError(f"{key} is damaged: {problem}")


def _problem_of_chunks(data: memoryview, chunks: Sequence[Chunk]) -> str:
    for chunk in chunks:
        if xxhash.xxh3_128_hexdigest(data[chunk.offset : chunk.offset + chunk.length]) != chunk.digest:
            return f"the XXH3-128 of the chunk at byte {chunk.offset} is not {chunk.digest}"
    return ""


def verify_and_mark(store: ObjectStore, run_id: str, ref: ManifestRef) -> int:
    """Verify a checkpoint and note the result: the mark of damage or of verification is set, the other one removed; returns the bytes read.

    Raises CorruptionError after marking it damaged, and NotFoundError if it was forgotten meanwhile.
    """
    try:
        _, size = verify_checkpoint(store, run_id, ref)
    except CorruptionError as error:
        store.get(ref.key(run_id))  # forgotten and swept while it was read: that is no damage
        clear_verified(store, run_id, ref)
        mark_damaged(store, run_id, ref, str(error))
        raise
    mark_verified(store, run_id, ref, size_bytes=size)
    clear_damage(store, run_id, ref)
    return size


def mark_damaged(store: ObjectStore, run_id: str, ref: ManifestRef, reason: str) -> None:
    """Mark a checkpoint so that loads step over it. It stays in the store, as evidence and for a second look."""
    store.put(damage_key(run_id, ref), seal("damage", {"reason": reason, "found_s": time.time()}))


def clear_damage(store: ObjectStore, run_id: str, ref: ManifestRef) -> None:
    """Take the mark away, after a full verification has passed."""
    store.delete([damage_key(run_id, ref)])


def list_checkpoints(store: ObjectStore, run_id: str) -> list[CheckpointRow]:
    """Return the checkpoints on the run's line, oldest first, damaged ones included."""
    history = read_history(store, run_id)
    verified, pins = list_verified(store, run_id), list_pins(store, run_id)
    rows = []
    for ref in sorted({*history.line, *history.damaged}):
        try:
            manifest: Manifest | None = load_manifest(store, run_id, ref)
        except (CorruptionError, NotFoundError):
            manifest = None
        damaged = ref in history.damaged or manifest is None
        rows.append(
            CheckpointRow(ref=ref, damaged=damaged, manifest=manifest, verified=ref in verified, pinned=ref in pins)
        )
    return rows


def loss_trace(store: ObjectStore, run_id: str) -> list[tuple[int, float | None]]:
    """Return (step, global mean loss) of every committed step on the run's line: replayed steps appear once, uncommitted ones not at all.

    A damaged checkpoint that later ones build upon is on the line; one that the run stepped back over is not. A forgotten one has left its losses.
    """
    newest = read_history(store, run_id).newest
    rows = {row.ref: row.manifest for row in list_checkpoints(store, run_id)}
    forgotten = list_forgotten(store, run_id) - rows.keys()
    points: dict[int, float | None] = {}
    for ref in chain(newest, [*rows, *forgotten]):
        if manifest := rows.get(ref):
            points.update(manifest.trace)
        elif ref in forgotten and (left := read_forgotten(store, run_id, ref)):
            points.update(left["trace"])
    return sorted(points.items())
