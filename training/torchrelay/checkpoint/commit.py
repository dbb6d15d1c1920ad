"""Writing a rank's shard, and the one PUT that commits a checkpoint.

Packs first, then the rank's record; when all records of (step, generation) are there, the leader proves the cover, that each pack is
there with its size, and that no newer generation exists, and PUTs the manifest. Whatever dies before that PUT leaves only objects that
nothing names; whoever comes next can finish a commit whose records are complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from torchrelay.checkpoint.cover import check_cover, check_sums, cover_sum
from torchrelay.checkpoint.history import History, check_fence
from torchrelay.checkpoint.layout import (
    ManifestRef,
    pack_key,
    packs_prefix,
    parse_record_key,
    records_prefix,
)
from torchrelay.checkpoint.manifest import (
    Box,
    Chunk,
    Manifest,
    PackInfo,
    RecordSummary,
    ShardRecord,
    TensorMeta,
    assemble_manifest,
)
from torchrelay.checkpoint.marks import list_forgotten
from torchrelay.checkpoint.pack import Pack, Piece, build_pack, digest_of, group_pieces
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.base import ObjectInfo, ObjectStore

__all__ = ["KnownChunks", "Shard", "commit_manifest", "finish_pending", "write_shard"]

_HASH_BYTES = 16 * 2**20  # bytes hashed by one thread at a time
_LOOKUPS = 16  # packs looked up one by one; more are found in one listing of all
_SUMMARY_BYTES = 16 * 2**10  # first read of a record: holds the summary of a rank with up to 300 packs


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's part of one checkpoint, staged: boxes (tensor, corner, extent) and their pieces, and what goes into its record.

    ``tensors`` describes at least the tensors of the boxes.
    """

    run_id: str
    ref: ManifestRef
    rank: int
    world_size: int
    tensors: Mapping[str, TensorMeta]
    boxes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    pieces: tuple[Piece, ...]
    local: Any = None
    head: dict[str, Any] | None = None
    fragment: dict[str, Any] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(len(piece.data) for piece in self.pieces)


@dataclass(slots=True)
class KnownChunks:
    """Chunks of this rank's last shard (or of the checkpoint the generation began at), and the pack each lies in.

    Only these may be referenced: ``sweep`` relies on it.
    """

    places: dict[tuple[str, int], tuple[PackInfo, int]] = field(default_factory=dict)

    def find(self, chunk: tuple[str, int]) -> tuple[PackInfo, int] | None:
        """Return (pack, offset) of a chunk given by (digest, length)."""
        return self.places.get(chunk)

    @classmethod
    def of(cls, records: Iterable[ShardRecord]) -> KnownChunks:
        """Return what these records name."""
        return cls(
            {
                (chunk.digest, chunk.length): (packs[chunk.pack], chunk.offset)
                for record in records
                for packs in [[replace(pack, home=pack.home or record.ref) for pack in record.packs]]
                for box in record.boxes
                for chunk in box.chunks
            }
        )


def write_shard(
    store: ObjectStore,
    shard: Shard,
    *,
    executor: Executor,
    known: KnownChunks | None = None,
    pace: Callable[[str, int], None] = lambda work, size_bytes: None,
) -> ShardRecord:
    """Hash the pieces, PUT those the store does not hold yet as packs, in parallel, then PUT the record. The shard is *written* when this returns.

    ``known`` tells which chunks the store holds; packs it names are looked up before they are relied on. ``pace`` is called by the working threads
    before each piece of work, with "hash" or "put" and its bytes; it may wait. Repeating the call is harmless: packs are
    named by checkpoint and content. Raises what the store raises; nothing that was committed is touched.
    """

    def hash_all(batch: list[Piece]) -> list[str]:
        pace("hash", sum(len(piece.data) for piece in batch))
        return [digest_of(piece.data) for piece in batch]

    # Small batches: handing single small pieces to a thread costs more than hashing them.
    digests = list(chain.from_iterable(executor.map(hash_all, group_pieces(shard.pieces, limit_bytes=_HASH_BYTES))))
    references = _references(store, shard, digests, known, executor=executor)

    def write(group: list[int]) -> Pack:
        pack = build_pack([shard.pieces[i] for i in group], [digests[i] for i in group])
        pace("put", pack.info.size_bytes)
        store.put(pack_key(shard.run_id, shard.ref, pack.info.digest), pack.parts)
        return pack

    places: dict[tuple[str, int], tuple[PackInfo, int]] = dict(references)
    for pack in executor.map(write, _groups(shard.pieces, digests, references, known)):
        places |= {(digest, len(piece.data)): (pack.info, offset) for piece, offset, digest in pack.placed}
    record = _record(shard, digests, places)
    store.put(record.key, record.to_bytes())
    return record


def _record(
    shard: Shard, digests: Sequence[str], places: Mapping[tuple[str, int], tuple[PackInfo, int]]
) -> ShardRecord:
    packs: dict[PackInfo, int] = {}
    chunks: list[list[Chunk]] = [[] for _ in shard.boxes]
    for piece, digest in zip(shard.pieces, digests, strict=True):
        info, offset = places[digest, len(piece.data)]
        info = replace(info, home=None) if info.home == shard.ref else info
        number = packs.setdefault(info, len(packs))
        chunks[piece.box].append(Chunk(piece.start, len(piece.data), number, offset, digest))
    boxes = tuple(Box(*box, tuple(own)) for box, own in zip(shard.boxes, chunks, strict=True))
    return ShardRecord(
        run_id=shard.run_id,
        ref=shard.ref,
        rank=shard.rank,
        world_size=shard.world_size,
        packs=tuple(packs),
        boxes=boxes,
        cover=cover_sum(shard.tensors, boxes),
        local=shard.local,
        head=shard.head,
        fragment=shard.fragment,
    )


def _references(
    store: ObjectStore, shard: Shard, digests: Sequence[str], known: KnownChunks | None, *, executor: Executor
) -> dict[tuple[str, int], tuple[PackInfo, int]]:
    """Choose the chunks that are referenced instead of uploaded.

    An old pack is referenced only if this checkpoint uses at least half of it, so that what retention keeps alive is at most twice the state; and
    only if it is there with its size now.
    """
    if known is None:
        return {}
    wanted = {(digest, len(piece.data)) for piece, digest in zip(shard.pieces, digests, strict=True)}
    found = {chunk: place for chunk in wanted if (place := known.find(chunk))}
    used: Counter[PackInfo] = Counter()
    for (_, length), (info, _) in found.items():
        used[info] += length
    worth = [info for info, size in used.items() if 2 * size >= info.size_bytes]
    there = {
        info
        for info, size in zip(worth, _sizes(store, shard.run_id, worth, executor), strict=True)
        if size == info.size_bytes
    }
    return {chunk: place for chunk, place in found.items() if place[0] in there}


def _sizes(store: ObjectStore, run_id: str, packs: Sequence[PackInfo], executor: Executor) -> list[int | None]:
    """Size in the store of each pack; None if it is missing."""
    keys = [pack_key(run_id, pack.home, pack.digest) for pack in packs if pack.home]
    if len(keys) > _LOOKUPS:
        sizes = {item.key: item.size_bytes for item in store.list(packs_prefix(run_id)).objects}
        return [sizes.get(key) for key in keys]
    found = executor.map(lambda key: store.list(key, limit=1).objects, keys)
    return [
        next((item.size_bytes for item in items if item.key == key), None)
        for key, items in zip(keys, found, strict=True)
    ]


def _groups(
    pieces: Sequence[Piece],
    digests: Sequence[str],
    references: Mapping[tuple[str, int], object],
    known: KnownChunks | None,
) -> list[list[int]]:
    """Group what must be uploaded into packs, each content once; chunks that did not change since the last save apart from those that did."""
    stable: list[int] = []
    fresh: list[int] = []
    seen = set(references)
    for index, (piece, digest) in enumerate(zip(pieces, digests, strict=True)):
        chunk = (digest, len(piece.data))
        if chunk not in seen:
            seen.add(chunk)
            (stable if known is not None and known.find(chunk) else fresh).append(index)
    groups = []
    for side in (stable, fresh):
        numbers = iter(side)
        groups += [list(islice(numbers, len(group))) for group in group_pieces([pieces[i] for i in side])]
    return groups


def commit_manifest(
    store: ObjectStore, run_id: str, ref: ManifestRef, *, executor: Executor | None = None, partial: bool = False
) -> Manifest | None:
    """Commit the checkpoint if all its records are there; None if some are still missing.

    ``partial``: no more records will come, so if the run allows it (``info.partial_commits``) those that cover the whole state are enough: a dead
    replica does not cost the checkpoint, but its RNG, so that a run that goes on from it is no longer the one that never fell. Raises
    CorruptionError if the records do not make a whole checkpoint, FencedError if a newer generation exists.
    """
    found = {
        parsed[1]: (item, parsed[2])
        for item in store.list(records_prefix(run_id, ref)).objects
        if (parsed := parse_record_key(item.key))
    }
    if 0 not in found or (len(found) < found[0][1] and not partial):
        return None
    each = executor.map if executor is not None else map
    parsed_records = list(each(lambda rank: _look(store, found[rank][0]), sorted(found)))
    summaries = [(summary, size) for summary, size, _ in parsed_records]
    first = parsed_records[0][2]
    if first is None or first.head is None:
        raise CorruptionError(f"{summaries[0][0].key} does not say what the checkpoint is")
    if len(found) < summaries[0][0].world_size and not first.head["info"].get("partial_commits"):
        return None
    fragments = [record.fragment for _, _, record in parsed_records if record and record.fragment]
    manifest = assemble_manifest(first.head, summaries, fragments)
    if not check_sums(manifest.tensors, (summary.cover for summary, _ in summaries)):
        if len(summaries) < manifest.world_size:
            return None
        check_cover(
            manifest.tensors,
            [ShardRecord.from_bytes(store.get(summary.key), where=summary.key) for summary, _ in summaries],
        )
        raise CorruptionError(f"the records of step {ref.step} do not cover the state exactly once")
    _check_packs(store, run_id, (summary for summary, _ in summaries))
    check_fence(store, run_id, ref.generation)
    store.put(manifest.key, manifest.to_bytes())
    return manifest


def _look(store: ObjectStore, item: ObjectInfo) -> tuple[RecordSummary, int, ShardRecord | None]:
    """Read a record as far as a commit needs it: most ranks' only to the end of the summary."""
    data = store.get(item.key, length=min(item.size_bytes, _SUMMARY_BYTES))
    if bytes(data).count(b"\n") < 2:
        data = store.get(item.key)
    summary, rest = RecordSummary.parse(data, where=item.key)
    if not summary.needs_detail:
        return summary, item.size_bytes, None
    whole = data if len(rest) >= summary.detail_bytes else store.get(item.key)
    return summary, item.size_bytes, ShardRecord.from_bytes(whole, where=item.key)


def _check_packs(store: ObjectStore, run_id: str, records: Iterable[RecordSummary]) -> None:
    """Prove that each pack is in the store with the size its writer recorded."""
    wanted = {
        key: pack.size_bytes for record in records for key, pack in zip(record.pack_keys(), record.packs, strict=True)
    }
    sizes: dict[str, int] = {}
    if len(wanted) <= _LOOKUPS:
        for key in wanted:
            sizes |= {item.key: item.size_bytes for item in store.list(key, limit=1).objects}
    else:
        sizes = {item.key: item.size_bytes for item in store.list(packs_prefix(run_id)).objects}
    for key, size in wanted.items():
        if sizes.get(key) != size:
            raise CorruptionError(
                f"pack {key} is {'missing' if key not in sizes else 'of another size'}; the checkpoint is not committed"
            )


def finish_pending(store: ObjectStore, run_id: str, history: History) -> ManifestRef | None:
    """Commit the newest complete but uncommitted checkpoint of the newest generation, if there is one past the line.

    Only for a caller who knows that generation to be dead. Incomplete or unsound ones are left alone: nothing names them.
    """
    if history.newest is None:
        return None
    floor = max(history.latest.step if history.latest else 0, history.newest.begin_step)
    after = f"{records_prefix(run_id)}{floor + 1:012d}"
    refs = {
        parsed[0]
        for item in store.list(records_prefix(run_id), after=after).objects
        if (parsed := parse_record_key(item.key)) and parsed[0].generation == history.newest.number
    }
    # What was forgotten once may be swept at any time: it does not come back.
    for ref in sorted(refs - history.damaged - list_forgotten(store, run_id), reverse=True):
        try:
            if commit_manifest(store, run_id, ref, partial=True):
                return ref
        except (CorruptionError, NotFoundError):
            continue
    return None
