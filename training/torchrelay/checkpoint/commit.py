"""Writing a rank's shard, and the one PUT that commits a checkpoint.

Packs first, then the rank's record; when all records of (step, generation) are there, the leader proves the cover, that each pack is
there with its size, and that no newer generation exists, and PUTs the manifest. Whatever dies before that PUT leaves only objects that
nothing names; whoever comes next can finish a commit whose records are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from torchrelay.checkpoint.history import History, check_fence
from torchrelay.checkpoint.layout import (
    ManifestRef,
    pack_key,
    packs_prefix,
    parse_record_key,
    records_prefix,
)
from torchrelay.checkpoint.manifest import Box, Chunk, Manifest, PackInfo, ShardRecord, assemble_manifest
from torchrelay.checkpoint.pack import Pack, Piece, build_pack, group_pieces
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.base import ObjectStore

__all__ = ["Shard", "commit_manifest", "finish_pending", "write_shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's part of one checkpoint, staged: boxes (tensor, corner, extent) and their pieces, and what goes into its record."""

    run_id: str
    ref: ManifestRef
    rank: int
    world_size: int
    boxes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    pieces: tuple[Piece, ...]
    local: Any = None
    head: dict[str, Any] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(len(piece.data) for piece in self.pieces)


def write_shard(
    store: ObjectStore, shard: Shard, *, executor: Executor, on_bytes: Callable[[int], None] = lambda n: None
) -> ShardRecord:
    """Hash and PUT the shard's packs in parallel, then PUT its record. The shard is *written* when this returns.

    Repeating it is harmless: packs are named by their content. Raises what the store raises; nothing that was committed is touched.
    """

    def write(group: list[Piece]) -> Pack:
        pack = build_pack(group)
        store.put(pack_key(shard.run_id, pack.info.digest), pack.parts)
        on_bytes(pack.info.size_bytes)
        return pack

    packs: list[PackInfo] = []
    chunks: list[list[Chunk]] = [[] for _ in shard.boxes]
    for pack in executor.map(write, group_pieces(shard.pieces)):
        for piece, offset, digest in pack.placed:
            chunks[piece.box].append(Chunk(piece.start, len(piece.data), len(packs), offset, digest))
        packs.append(pack.info)
    record = ShardRecord(
        run_id=shard.run_id,
        ref=shard.ref,
        rank=shard.rank,
        world_size=shard.world_size,
        packs=tuple(packs),
        boxes=tuple(Box(*box, tuple(own)) for box, own in zip(shard.boxes, chunks, strict=True)),
        local=shard.local,
        head=shard.head,
    )
    store.put(record.key, record.to_bytes())
    return record


def commit_manifest(store: ObjectStore, run_id: str, ref: ManifestRef) -> Manifest | None:
    """Commit the checkpoint if all its records are there; None if some are still missing.

    Raises CorruptionError if the records do not make a whole checkpoint, FencedError if a newer generation exists.
    """
    keys = [item.key for item in store.list(records_prefix(run_id, ref)).objects]
    if not _complete(keys):
        return None
    records = []
    for key in keys:
        data = bytes(store.get(key))
        records.append((ShardRecord.from_bytes(data, where=key), data))
    manifest = assemble_manifest(records)
    _check_packs(store, run_id, (record for record, _ in records))
    check_fence(store, run_id, ref.generation)
    store.put(manifest.key, manifest.to_bytes())
    return manifest


def _complete(keys: Sequence[str]) -> bool:
    parsed = [item for key in keys if (item := parse_record_key(key))]
    return bool(parsed) and sorted(rank for _, rank, _ in parsed) == list(range(parsed[0][2]))


def _check_packs(store: ObjectStore, run_id: str, records: Iterable[ShardRecord]) -> None:
    """Prove that each pack is in the store with the size its writer recorded."""
    wanted = {pack_key(run_id, pack.digest): pack.size_bytes for record in records for pack in record.packs}
    sizes: dict[str, int] = {}
    if len(wanted) <= 16:
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
    for ref in sorted(refs - history.damaged, reverse=True):
        try:
            if commit_manifest(store, run_id, ref):
                return ref
        except (CorruptionError, NotFoundError):
            continue
    return None
