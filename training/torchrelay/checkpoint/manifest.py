"""Shard records and manifests: what one rank wrote, and what the whole checkpoint is.

Two levels, so that a commit costs O(ranks): the manifest names the shard records with their digests and holds what is global
(tensor table, state, data position); where the bytes lie is in the records. A record itself has a short first part, all that a commit
reads, and a detail named by its digest. All are sealed, typed JSON; parsing one that is not well-formed raises CorruptionError, never anything else.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrelay.checkpoint.layout import DTYPES, ManifestRef, pack_key, record_key
from torchrelay.checkpoint.sealed import seal, unseal, unseal_first
from torchrelay.errors import CorruptionError
from torchrelay.store.base import Buffer

__all__ = [
    "Box",
    "Chunk",
    "Manifest",
    "PackInfo",
    "RecordRef",
    "RecordSummary",
    "ShardRecord",
    "TensorMeta",
    "assemble_manifest",
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
    """A pack: the XXH3-128 that names it (hex), its size, and the checkpoint that wrote it (None: the one of the record it stands in)."""

    digest: str
    size_bytes: int
    home: ManifestRef | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """What one rank wrote for one step.

    ``cover`` is the sum by which a commit proves that the parts of all ranks cover the state (see ``cover``). ``local`` is typed JSON that belongs to
    this rank alone (RNG). ``head`` is the body of the manifest without its records; rank 0 writes it, so that anyone can finish the commit when
    the committing process has died. ``fragment`` adds to it what only this rank knows: {"tensors": ..., "items": {component: [[key, node], ...]}}.
    """

    run_id: str
    ref: ManifestRef
    rank: int
    world_size: int
    packs: tuple[PackInfo, ...]
    boxes: tuple[Box, ...]
    cover: int = 0
    local: Any = None
    head: dict[str, Any] | None = None
    fragment: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        """Where the record lies."""
        return record_key(self.run_id, self.ref, self.rank, self.world_size)

    def pack_keys(self) -> list[str]:
        """Where its packs lie, in order."""
        return _pack_keys(self)

    def to_bytes(self) -> bytes:
        """Serialise, sealed: the summary as the document's body, then the detail on a line of its own."""
        detail = {
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
            "fragment": self.fragment,
        }
        line = json.dumps(detail, separators=(",", ":"), allow_nan=False).encode()
        summary = {
            "run_id": self.run_id,
            "step": self.ref.step,
            "generation": self.ref.generation,
            "rank": self.rank,
            "world_size": self.world_size,
            "packs": [
                [pack.digest, pack.size_bytes, *((pack.home.step, pack.home.generation) if pack.home else ())]
                for pack in self.packs
            ],
            "cover": f"{self.cover:032x}",
            "needs_detail": self.head is not None or self.fragment is not None,
            "detail": [hashlib.sha256(line).hexdigest(), len(line)],
        }
        return seal("record", summary) + line + b"\n"

    @classmethod
    def from_bytes(cls, data: Buffer, *, where: str) -> ShardRecord:
        """Parse and check one record."""
        summary, rest = RecordSummary.parse(data, where=where)
        rest = rest.removesuffix(b"\n")
        if (hashlib.sha256(rest).hexdigest(), len(rest)) != (summary.detail_sha256, summary.detail_bytes):
            raise CorruptionError(f"{where} is damaged: the SHA-256 of its detail does not match")
        try:
            body = json.loads(rest)
            boxes = tuple(
                Box(
                    str(name),
                    _naturals(corner),
                    _naturals(extent),
                    tuple(_chunk(numbers, digest) for *numbers, digest in chunks),
                )
                for name, corner, extent, chunks in body["boxes"]
            )
            record = cls(
                run_id=summary.run_id,
                ref=summary.ref,
                rank=summary.rank,
                world_size=summary.world_size,
                packs=summary.packs,
                boxes=boxes,
                cover=summary.cover,
                local=body["local"],
                head=body["head"],
                fragment=body["fragment"],
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSummary:
    """The first part of a shard record: all that a commit needs of most ranks. ``sha256`` names the record, detail included."""

    run_id: str
    ref: ManifestRef
    rank: int
    world_size: int
    packs: tuple[PackInfo, ...]
    cover: int
    needs_detail: bool
    detail_sha256: str
    detail_bytes: int
    sha256: str

    @classmethod
    def parse(cls, data: Buffer, *, where: str) -> tuple[RecordSummary, bytes]:
        """Parse the summary from a record, or from a beginning of it that holds two whole lines; return it and the bytes after it."""
        body, sha256, rest = unseal_first("record", data, where=where)
        try:
            detail_sha256, detail_bytes = body["detail"]
            summary = cls(
                run_id=str(body["run_id"]),
                ref=ManifestRef(int(body["step"]), int(body["generation"])),
                rank=int(body["rank"]),
                world_size=int(body["world_size"]),
                packs=tuple(_pack(*numbers) for numbers in body["packs"]),
                cover=int(body["cover"], 16),
                needs_detail=bool(body["needs_detail"]),
                detail_sha256=str(detail_sha256),
                detail_bytes=int(detail_bytes),
                sha256=sha256,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(f"{where} is malformed: {error!r}") from None
        return summary, rest

    @property
    def key(self) -> str:
        """Where the record lies."""
        return record_key(self.run_id, self.ref, self.rank, self.world_size)

    def pack_keys(self) -> list[str]:
        """Where its packs lie, in order."""
        return _pack_keys(self)


@dataclass(frozen=True, slots=True)
class RecordRef:
    """Names one shard record by its rank, the SHA-256 (hex) in its first line, and its size."""

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
        """Keys of the shard records there are, in rank order."""
        return [self.record_key(record.rank) for record in self.records]

    def record_key(self, rank: int) -> str:
        """Key of one rank's record."""
        return record_key(self.run_id, self.ref, rank, self.world_size)

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


def _pack(digest: object, size: object, step: object = None, generation: object = None) -> PackInfo:
    (size_bytes,) = _naturals([size])
    home = None if step is None else ManifestRef(*_naturals([step, generation]))
    return PackInfo(str(digest), size_bytes, home)


def _pack_keys(record: ShardRecord | RecordSummary) -> list[str]:
    return [pack_key(record.run_id, pack.home or record.ref, pack.digest) for pack in record.packs]


def _chunk(numbers: Iterable[Any], digest: object) -> Chunk:
    start, length, pack, offset = _naturals(numbers)
    return Chunk(start, length, pack, offset, str(digest))


def assemble_manifest(
    head: Mapping[str, Any], records: Sequence[tuple[RecordSummary, int]], fragments: Iterable[Mapping[str, Any]] = ()
) -> Manifest:
    """Build the manifest of one step from rank 0's head, the records' summaries (with the objects' sizes) and the ranks' fragments.

    A pure function, so that whoever commits (the leader, or a successor after its death) writes the same bytes. Raises CorruptionError if a record
    belongs to another checkpoint.
    """
    by_rank = sorted(records, key=lambda pair: pair[0].rank)
    base = Manifest.from_body(head, where="the head of rank 0's record")
    for record, _ in by_rank:
        if (record.ref, record.run_id, record.world_size) != (base.ref, base.run_id, base.world_size):
            raise CorruptionError(f"{record.key} belongs to another checkpoint than {base.key}")
    body = base.head()
    for fragment in fragments:
        _add_fragment(body, fragment)
    body["records"] = [[record.rank, record.sha256, size] for record, size in by_rank]
    manifest = Manifest.from_body(body, where=base.key)
    return Manifest.from_bytes(manifest.to_bytes(), where=base.key)


def _add_fragment(body: dict[str, Any], fragment: Mapping[str, Any]) -> None:
    """Add what one rank alone knows: its tensors, and items of the ``state`` mapping of a component (ZeroRedundancyOptimizer)."""
    try:
        body["tensors"] = {**body["tensors"], **fragment["tensors"]}
        for component, items in fragment["items"].items():
            tree = dict(body["state"][component])
            there = tree["state"].get("$dict", []) if tree["state"] else []
            tree["state"] = {"$dict": sorted([*there, *items], key=lambda item: item[0])}
            body["state"] = {**body["state"], component: tree}
    except (AttributeError, KeyError, TypeError) as error:
        raise CorruptionError(f"a fragment of the state is malformed: {error!r}") from None
