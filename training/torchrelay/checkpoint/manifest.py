"""Shard records and manifests: what one rank wrote, and what the whole checkpoint is.

Two levels, so that a commit costs O(ranks): the manifest names the shard records with their digests and holds what is global
(tensor table, state, data position); where the bytes lie is in the records. Both are sealed, typed JSON; parsing one that is
not well-formed raises CorruptionError, never anything else.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torchrelay.checkpoint.layout import DTYPES, ManifestRef, record_key
from torchrelay.checkpoint.sealed import seal, unseal
from torchrelay.errors import CorruptionError
from torchrelay.store.base import Buffer

__all__ = [
    "Box",
    "Chunk",
    "Manifest",
    "PackInfo",
    "RecordRef",
    "ShardRecord",
    "TensorMeta",
    "assemble_manifest",
    "check_cover",
]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Element type (PyTorch's name, such as ``bfloat16``) and global shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes ``[start, start + length)`` of a box (row-major), at ``offset`` of pack number ``pack`` of the record."""

    start: int
    length: int
    pack: int
    offset: int
    digest: str


@dataclass(frozen=True, slots=True)
class Box:
    """A part of one tensor: its corner and extent per dimension, and the chunks of it that this rank wrote.

    A replicated tensor is one box (the whole tensor) whose chunks are divided over the ranks.
    """

    tensor: str
    corner: tuple[int, ...]
    extent: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class PackInfo:
    """A pack: XXH3-128 of the object (hex) and its size."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """What one rank wrote for one step.

    ``local`` is typed JSON that belongs to this rank alone (RNG). ``head`` is the body of the manifest without its records; rank 0 writes it, so that
    anyone can finish the commit when the committing process has died.
    """

    run_id: str
    ref: ManifestRef
    rank: int
    world_size: int
    packs: tuple[PackInfo, ...]
    boxes: tuple[Box, ...]
    local: Any = None
    head: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        """Where the record lies."""
        return record_key(self.run_id, self.ref, self.rank, self.world_size)

    def to_bytes(self) -> bytes:
        """Serialise, sealed."""
        body = {
            "run_id": self.run_id,
            "step": self.ref.step,
            "generation": self.ref.generation,
            "rank": self.rank,
            "world_size": self.world_size,
            "packs": [[pack.digest, pack.size_bytes] for pack in self.packs],
            "boxes": [
                [
                    box.tensor,
                    box.corner,
                    box.extent,
                    [[c.start, c.length, c.pack, c.offset, c.digest] for c in box.chunks],
                ]
                for box in self.boxes
            ],
            "local": self.local,
            "head": self.head,
        }
        return seal("record", body)

    @classmethod
    def from_bytes(cls, data: Buffer, *, where: str) -> ShardRecord:
        """Parse and check one record."""
        body = unseal("record", data, where=where)
        try:
            record = cls(
                run_id=str(body["run_id"]),
                ref=ManifestRef(int(body["step"]), int(body["generation"])),
                rank=int(body["rank"]),
                world_size=int(body["world_size"]),
                packs=tuple(PackInfo(str(digest), int(size)) for digest, size in body["packs"]),
                boxes=tuple(
                    Box(
                        str(name),
                        _naturals(corner),
                        _naturals(extent),
                        tuple(_chunk(numbers, digest) for *numbers, digest in chunks),
                    )
                    for name, corner, extent, chunks in body["boxes"]
                ),
                local=body["local"],
                head=body["head"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{where} is malformed: {error!r}") from None
        for box in record.boxes:
            for chunk in box.chunks:
                if not (
                    0 <= chunk.pack < len(record.packs)
                    and chunk.offset + chunk.length <= record.packs[chunk.pack].size_bytes
                ):
                    raise CorruptionError(f"{where}: a chunk of {box.tensor} lies outside its pack")
        return record


@dataclass(frozen=True, slots=True)
class RecordRef:
    """Names one shard record by its rank, digest (SHA-256, hex) and size."""

    rank: int
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The checkpoint. Its one PUT is the commit.

    ``state`` is typed JSON whose tensor references name entries of ``tensors``. ``data`` is the sampler's state (position, dataset version,
    ledger hash). ``trace`` is
    ``[step, loss]`` of the steps that were not committed before; it may repeat some of the checkpoint before. ``info`` holds provenance and costs.
    """

    run_id: str
    ref: ManifestRef
    world_size: int
    begin: ManifestRef | None
    tensors: dict[str, TensorMeta]
    state: Any
    data: dict[str, Any] = field(default_factory=dict)
    trace: tuple[tuple[int, float | None], ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    records: tuple[RecordRef, ...] = ()

    @property
    def key(self) -> str:
        """Where the manifest lies."""
        return self.ref.key(self.run_id)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(meta.size_bytes for meta in self.tensors.values())

    def record_keys(self) -> list[str]:
        """Keys of the shard records, in rank order."""
        return [record_key(self.run_id, self.ref, record.rank, self.world_size) for record in self.records]

    def head(self) -> dict[str, Any]:
        """The body without the records, as it travels in rank 0's shard record."""
        return {
            "run_id": self.run_id,
            "step": self.ref.step,
            "generation": self.ref.generation,
            "world_size": self.world_size,
            "begin": [self.begin.step, self.begin.generation] if self.begin else None,
            "tensors": {name: [meta.dtype, meta.shape] for name, meta in self.tensors.items()},
            "state": self.state,
            "data": self.data,
            "trace": self.trace,
            "info": self.info,
        }

    def to_bytes(self) -> bytes:
        """Serialise, sealed. The same manifest always gives the same bytes."""
        records = [[record.rank, record.sha256, record.size_bytes] for record in self.records]
        return seal("manifest", {**self.head(), "records": records})

    @classmethod
    def from_bytes(cls, data: Buffer, *, where: str) -> Manifest:
        """Parse and check a manifest."""
        return cls.from_body(unseal("manifest", data, where=where), where=where)

    @classmethod
    def from_body(cls, body: Mapping[str, Any], *, where: str) -> Manifest:
        """Build a manifest from its JSON body (without records, if it is a head)."""
        try:
            tensors = {
                name: TensorMeta(str(dtype), _naturals(shape)) for name, (dtype, shape) in body["tensors"].items()
            }
            unknown = sorted({meta.dtype for meta in tensors.values()} - DTYPES.keys())
            if unknown:
                raise CorruptionError(f"{where} holds element types this version does not know: {unknown}")
            return cls(
                run_id=str(body["run_id"]),
                ref=ManifestRef(int(body["step"]), int(body["generation"])),
                world_size=int(body["world_size"]),
                begin=ManifestRef(*map(int, body["begin"])) if body["begin"] else None,
                tensors=tensors,
                state=body["state"],
                data=dict(body["data"]),
                trace=tuple((int(step), loss) for step, loss in body["trace"]),
                info=dict(body["info"]),
                records=tuple(RecordRef(int(rank), str(sha), int(size)) for rank, sha, size in body.get("records", ())),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{where} is malformed: {error!r}") from None


def _naturals(values: Iterable[Any]) -> tuple[int, ...]:
    """Read sizes and places. Two negative extents would multiply to a volume that looks right."""
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} are not all integers from 0 up")
    return numbers


def _chunk(numbers: Iterable[Any], digest: object) -> Chunk:
    start, length, pack, offset = _naturals(numbers)
    return Chunk(start, length, pack, offset, str(digest))


def assemble_manifest(records: Sequence[tuple[ShardRecord, bytes]]) -> Manifest:
    """Build the manifest of one step from all its shard records (parsed, and as stored); a pure function of them.

    So whoever commits (the leader, or a successor after its death) writes the same bytes. Raises CorruptionError if a rank is missing, or if the
    records do not cover every tensor exactly once.
    """
    by_rank = sorted(records, key=lambda pair: pair[0].rank)
    first = by_rank[0][0]
    if [record.rank for record, _ in by_rank] != list(range(first.world_size)) or first.head is None:
        raise CorruptionError(
            f"shard records of step {first.ref.step} are not those of ranks 0..{first.world_size - 1}"
        )
    base = Manifest.from_body(first.head, where=first.key)
    for record, _ in by_rank:
        if (record.ref, record.run_id, record.world_size) != (base.ref, base.run_id, base.world_size):
            raise CorruptionError(f"{record.key} belongs to another checkpoint than {first.key}")
    check_cover(base.tensors, [record for record, _ in by_rank])
    refs = tuple(RecordRef(record.rank, hashlib.sha256(data).hexdigest(), len(data)) for record, data in by_rank)
    manifest = Manifest.from_body(
        {**base.head(), "records": [[r.rank, r.sha256, r.size_bytes] for r in refs]}, where=base.key
    )
    return Manifest.from_bytes(manifest.to_bytes(), where=base.key)


def check_cover(tensors: Mapping[str, TensorMeta], records: Iterable[ShardRecord]) -> None:
    """Prove that every element of every tensor is stored exactly once. Raises CorruptionError naming the first tensor that is not."""
    parts: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]]] = {
        name: {} for name in tensors
    }
    for record in records:
        for box in record.boxes:
            if box.tensor not in parts:
                raise CorruptionError(f"{record.key} holds a tensor that is not in the table: {box.tensor}")
            spans = parts[box.tensor].setdefault((box.corner, box.extent), [])
            spans += [(chunk.start, chunk.length) for chunk in box.chunks]
    for name, meta in tensors.items():
        item = DTYPES[meta.dtype][1]
        for (_, extent), spans in parts[name].items():
            _check_spans(name, spans, math.prod(extent) * item)
        _check_boxes(name, list(parts[name]), meta.shape)


def _check_spans(name: str, spans: list[tuple[int, int]], size_bytes: int) -> None:
    position = 0
    for start, length in sorted(spans):
        if start != position:
            raise CorruptionError(
                f"tensor {name}: byte {min(start, position)} is stored {'twice' if start < position else 'nowhere'}"
            )
        position = start + length
    if position != size_bytes:
        raise CorruptionError(f"tensor {name}: {position} of {size_bytes} bytes are stored")


def _check_boxes(name: str, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...]) -> None:
    for corner, extent in boxes:
        if len(corner) != len(shape) or len(extent) != len(shape):
            raise CorruptionError(f"tensor {name}: a part has another number of dimensions")
        if any(low < 0 or low + size > full for low, size, full in zip(corner, extent, shape, strict=True)):
            raise CorruptionError(f"tensor {name}: a part lies outside its shape {shape}")
    solid = sorted(box for box in boxes if math.prod(box[1]))
    if sum(math.prod(extent) for _, extent in solid) != math.prod(shape):
        raise CorruptionError(f"tensor {name}: its parts do not add up to its shape {shape}")
    # Sorted by corner, parts cut along the first dimension only can overlap only with their neighbours; anything else is compared in pairs.
    rows_only = all(extent[1:] == shape[1:] for _, extent in solid)
    pairs = pairwise(solid) if rows_only else ((a, b) for i, a in enumerate(solid) for b in solid[i + 1 :])
    for (corner_a, extent_a), (corner_b, extent_b) in pairs:
        if all(a < b + m and b < a + n for a, n, b, m in zip(corner_a, extent_a, corner_b, extent_b, strict=True)):
            raise CorruptionError(f"tensor {name}: two of its parts overlap")
