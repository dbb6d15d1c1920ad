"""Packs: immutable objects of at most 64 MiB, each a valid safetensors file whose entries are chunks.

Pieces are packed in order without copying their bytes: a pack is its header followed by views. Its name is the XXH3-128 of all of it,
so writing it twice is harmless; each chunk's own XXH3-128 goes into the shard record and is checked on every load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from torchrelay.checkpoint.layout import DTYPES, PACK_BYTES
from torchrelay.checkpoint.manifest import PackInfo

__all__ = ["Pack", "Piece", "build_pack", "group_pieces"]

_ENTRY_BYTES = 96  # JSON of one header entry besides its name: generous, the exact size does not matter


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk to be written: bytes ``[start, start + len(data))`` of box number ``box``; ``name`` is unique in the checkpoint."""

    name: str
    dtype: str
    box: int
    start: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack ready to be written: its identity, its parts, and per piece the offset in the object and the digest of its bytes."""

    info: PackInfo
    parts: tuple[memoryview, ...]
    placed: tuple[tuple[Piece, int, str], ...]


def group_pieces(pieces: Sequence[Piece], *, limit_bytes: int = PACK_BYTES) -> Iterator[list[Piece]]:
    """Split pieces, in order, into groups that fit into one pack each."""
    group: list[Piece] = []
    size = 512
    for piece in pieces:
        cost = len(piece.data) + len(json.dumps(piece.name)) + _ENTRY_BYTES
        if group and size + cost > limit_bytes:
            yield group
            group, size = [], 512
        group.append(piece)
        size += cost
    if group:
        yield group


def build_pack(pieces: Sequence[Piece]) -> Pack:
    """Lay out one pack and hash it. The pieces' bytes are read once for the chunk digests and once for the pack's."""
    header: dict[str, object] = {"__metadata__": {"format": "torchrelay/pack/1"}}
    position = 0
    for piece in pieces:
        code, item = DTYPES[piece.dtype]
        count = len(piece.data) if code == "U8" else len(piece.data) // item
        header[piece.name] = {"dtype": code, "shape": [count], "data_offsets": [position, position + len(piece.data)]}
        position += len(piece.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    whole = xxhash.xxh3_128(head)
    offset, placed = len(head), []
    for piece in pieces:
        placed.append((piece, offset, xxhash.xxh3_128_hexdigest(piece.data)))
        whole.update(piece.data)
        offset += len(piece.data)
    return Pack(PackInfo(whole.hexdigest(), offset), (head, *(piece.data for piece in pieces)), tuple(placed))
