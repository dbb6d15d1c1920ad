"""Reading checkpoints: every byte that is used is hashed first.

A damaged checkpoint is reported and marked, and the caller steps back to an older one; it is never deleted here. One second reading
is allowed before damage is declared, so that a bit flipped on the wire does not cost a good checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash

from torchrelay.checkpoint.history import chain, read_history
from torchrelay.checkpoint.layout import DTYPES, ManifestRef, damage_key, pack_key
from torchrelay.checkpoint.manifest import Box, Chunk, Manifest, PackInfo, ShardRecord, TensorMeta, check_cover
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
    "read_tensors",
    "verify_checkpoint",
]

_READ_BYTES = 16 * 2**20  # adjacent chunks of a pack are fetched by one GET up to this size
_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    """One line of the table of checkpoints. ``size_bytes`` is the size of all tensors; ``manifest`` is None if it cannot be read."""

    ref: ManifestRef
    damaged: bool
    manifest: Manifest | None

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors; 0 if unreadable."""
        return self.manifest.size_bytes if self.manifest else 0


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One ranged GET: bytes ``[offset, offset + length)`` of a pack, and the chunks in it with the buffer each goes to (None: only hash)."""

    key: str
    offset: int
    length: int
    chunks: tuple[tuple[Chunk, memoryview | None], ...]


def load_manifest(store: ObjectStore, run_id: str, ref: ManifestRef) -> Manifest:
    """Read one manifest. Raises NotFoundError or CorruptionError."""
    key = ref.key(run_id)
    try:
        return Manifest.from_bytes(store.get(key), where=key)
    except CorruptionError:
        return Manifest.from_bytes(store.get(key), where=key)


def load_records(store: ObjectStore, manifest: Manifest, *, executor: Executor) -> list[ShardRecord]:
    """Read the shard records a manifest names, in rank order, checking their digests."""
    return list(executor.map(lambda rank: load_record(store, manifest, rank), range(len(manifest.records))))


def load_record(store: ObjectStore, manifest: Manifest, rank: int) -> ShardRecord:
    """Read one rank's record of a checkpoint. Raises CorruptionError if it is not what the manifest names."""
    key, ref = manifest.record_keys()[rank], manifest.records[rank]
    for _ in range(2):
        try:
            data = bytes(store.get(key))
        except NotFoundError:
            raise CorruptionError(f"{key} is missing") from None
        if len(data) == ref.size_bytes and hashlib.sha256(data).hexdigest() == ref.sha256:
            return ShardRecord.from_bytes(data, where=key)
    raise CorruptionError(f"{key} does not match the digest in its manifest")


def read_tensors(
    store: ObjectStore, manifest: Manifest, buffers: Mapping[str, memoryview], *, threads: int = _THREADS
) -> int:
    """Fill one writable byte buffer per wanted tensor with its elements (row-major, little-endian). Returns the bytes fetched.

    Every chunk is hashed before this returns; on CorruptionError the buffers' content is undefined.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="restore") as executor:
        fetches: list[_Fetch] = []
        scattered: list[tuple[TensorMeta, Box, bytearray]] = []
        for record in load_records(store, manifest, executor=executor):
            fetches += _plan(record, manifest, buffers, scattered)
        done = list(executor.map(lambda fetch: _read(store, fetch), fetches))
    for meta, box, raw in scattered:
        _scatter(meta, box, raw, buffers[box.tensor])
    return sum(done)


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
    """Hash a whole pack against its name (header and padding included), then each chunk in it; returns its size."""
    info = record.packs[number]
    key = pack_key(record.run_id, info.digest)
    chunks = [chunk for box in record.boxes for chunk in box.chunks if chunk.pack == number]
    problem = ""
    for _ in range(2):
        try:
            data = store.get(key)
        except NotFoundError:
            raise CorruptionError(f"{key} is missing") from None
        problem = _problem_of_pack(data, info, chunks)
        if not problem:
            return len(data)
    raise CorruptionError(f"{key} is damaged: {problem}")


def _problem_of_pack(data: memoryview, info: PackInfo, chunks: Sequence[Chunk]) -> str:
    if len(data) != info.size_bytes:
        return f"it has {len(data)} bytes instead of {info.size_bytes}"
    for chunk in chunks:
        if xxhash.xxh3_128_hexdigest(data[chunk.offset : chunk.offset + chunk.length]) != chunk.digest:
            return f"the XXH3-128 of the chunk at byte {chunk.offset} is not {chunk.digest}"
    return "" if xxhash.xxh3_128_hexdigest(data) == info.digest else "its XXH3-128 is not its name"


def mark_damaged(store: ObjectStore, run_id: str, ref: ManifestRef, reason: str) -> None:
    """Mark a checkpoint so that loads step over it. It stays in the store, as evidence and for a second look."""
    store.put(damage_key(run_id, ref), seal("damage", {"reason": reason, "found_s": time.time()}))


def clear_damage(store: ObjectStore, run_id: str, ref: ManifestRef) -> None:
    """Take the mark away, after a full verification has passed."""
    store.delete([damage_key(run_id, ref)])


def list_checkpoints(store: ObjectStore, run_id: str) -> list[CheckpointRow]:
    """Return the checkpoints on the run's line, oldest first, damaged ones included."""
    history = read_history(store, run_id)
    rows = []
    for ref in sorted({*history.line, *history.damaged}):
        try:
            manifest: Manifest | None = load_manifest(store, run_id, ref)
        except (CorruptionError, NotFoundError):
            manifest = None
        rows.append(CheckpointRow(ref=ref, damaged=ref in history.damaged or manifest is None, manifest=manifest))
    return rows


def loss_trace(store: ObjectStore, run_id: str) -> list[tuple[int, float | None]]:
    """Return (step, global mean loss) of every committed step on the run's line: replayed steps appear once, uncommitted ones not at all.

    A damaged checkpoint that later ones build upon is on the line; one that the run stepped back over is not.
    """
    newest = read_history(store, run_id).newest
    rows = {row.ref: row.manifest for row in list_checkpoints(store, run_id)}
    points: dict[int, float | None] = {}
    for ref in chain(newest, rows):
        if manifest := rows[ref]:
            points.update(manifest.trace)
    return sorted(points.items())


def _plan(
    record: ShardRecord,
    manifest: Manifest,
    buffers: Mapping[str, memoryview],
    scattered: list[tuple[TensorMeta, Box, bytearray]],
) -> list[_Fetch]:
    wanted: list[tuple[Chunk, memoryview | None]] = []
    for box in record.boxes:
        target = buffers.get(box.tensor)
        if target is None or not box.chunks:
            continue
        meta = manifest.tensors[box.tensor]
        item = DTYPES[meta.dtype][1]
        if box.extent[1:] == meta.shape[1:]:
            # Rows of the tensor: the box is one range of its bytes.
            row = math.prod(meta.shape[1:]) * item
            base = box.corner[0] * row if box.corner else 0
            wanted += [(chunk, target[base + chunk.start : base + chunk.start + chunk.length]) for chunk in box.chunks]
        else:
            raw = bytearray(math.prod(box.extent) * item)
            scattered.append((meta, box, raw))
            wanted += [(chunk, memoryview(raw)[chunk.start : chunk.start + chunk.length]) for chunk in box.chunks]
    return _coalesce(record, wanted)


def _coalesce(record: ShardRecord, wanted: Sequence[tuple[Chunk, memoryview | None]]) -> list[_Fetch]:
    """Join chunks that lie side by side in a pack into one GET."""
    fetches: list[_Fetch] = []
    group: list[tuple[Chunk, memoryview | None]] = []

    def close() -> None:
        if group:
            first, last = group[0][0], group[-1][0]
            key = pack_key(record.run_id, record.packs[first.pack].digest)
            fetches.append(_Fetch(key, first.offset, last.offset + last.length - first.offset, tuple(group)))
            group.clear()

    for chunk, target in sorted(wanted, key=lambda pair: (pair[0].pack, pair[0].offset)):
        if group:
            last = group[-1][0]
            adjacent = (chunk.pack, chunk.offset) == (last.pack, last.offset + last.length)
            if not adjacent or chunk.offset + chunk.length - group[0][0].offset > _READ_BYTES:
                close()
        group.append((chunk, target))
    close()
    return fetches


def _read(store: ObjectStore, fetch: _Fetch) -> int:
    bad = None
    for _ in range(2):
        try:
            bad = _read_once(store, fetch)
        except NotFoundError:
            raise CorruptionError(f"{fetch.key} is missing") from None
        if bad is None:
            return fetch.length
    assert bad is not None
    raise CorruptionError(f"{fetch.key} is damaged at byte {bad.offset}: its XXH3-128 is not {bad.digest}")


def _read_once(store: ObjectStore, fetch: _Fetch) -> Chunk | None:
    """Fetch and hash; return the first chunk that does not match."""
    into = fetch.chunks[0][1] if len(fetch.chunks) == 1 else None
    data = store.get(fetch.key, offset=fetch.offset, length=fetch.length, into=into)
    for chunk, target in fetch.chunks:
        part = data[chunk.offset - fetch.offset : chunk.offset - fetch.offset + chunk.length]
        if xxhash.xxh3_128_hexdigest(part) != chunk.digest:
            return chunk
        if target is not None and into is None:
            target[:] = part
    return None


def _scatter(meta: TensorMeta, box: Box, raw: bytearray, target: memoryview) -> None:
    """Copy the bytes of a box into its place in the whole tensor."""
    item = DTYPES[meta.dtype][1]
    whole = np.frombuffer(target, dtype=f"V{item}").reshape(meta.shape)
    place = tuple(slice(low, low + size) for low, size in zip(box.corner, box.extent, strict=True))
    # The view is of a writable buffer; numpy marks frombuffer arrays read-only only when the buffer is.
    whole[place] = np.frombuffer(raw, dtype=f"V{item}").reshape(box.extent)
