"""Packs: immutable objects of at most 64 MiB, each a valid safetensors file whose entries are chunks.

Pieces are packed in order without copying their bytes: a pack is its header followed by views. The header holds the XXH3-128 of every
chunk, and the pack is named by the XXH3-128 of its header: the name proves all of it, each byte is hashed once, and writing it twice is harmless.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from torchrelay.checkpoint.layout import DTYPES, PACK_BYTES
from torchrelay.checkpoint.manifest import PackInfo
from torchrelay.store.base import Buffer

__all__ = ["HEADER_BYTES", "Pack", "Piece", "build_pack", "digest_of", "group_pieces", "piece_cost", "problem_of_pack"]

HEADER_BYTES = 4096
"""A header is padded to a multiple of this, so that its data can be written to a disk without a copy; also what an empty one takes."""

_ENTRY_BYTES = (
    128  # JSON of one header entry besides its name, and its digest: generous, the exact size does not matter
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk to be written: bytes ``[start, start + len(data))`` of box number ``box``; ``name`` is unique in the checkpoint.

    Pieces of one ``group`` lie one after another in memory and go into one pack.
    """

    name: str
    dtype: str
    box: int
    start: int
    data: memoryview
    group: int = 0


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack ready to be written: its identity, its parts, and per piece the offset in the object and the digest of its bytes."""

    info: PackInfo
    parts: tuple[memoryview, ...]
    placed: tuple[tuple[Piece, int, str], ...]


def piece_cost(name: str, size_bytes: int) -> int:
    """Bytes that a piece of this name and size takes in a pack, at most."""
    plain = name.isascii() and name.isprintable() and '"' not in name and "\\" not in name
    return size_bytes + (len(name) if plain else len(json.dumps(name))) + _ENTRY_BYTES


def group_pieces(pieces: Sequence[Piece], *, limit_bytes: int = PACK_BYTES) -> Iterator[list[Piece]]:
    """Split pieces, in order, into groups that fit into one pack each; those of different groups stay apart."""
    group: list[Piece] = []
    size = HEADER_BYTES
    for piece in pieces:
        cost = piece_cost(piece.name, len(piece.data))
        if group and (size + cost > limit_bytes or piece.group != group[-1].group):
            yield group
            group, size = [], HEADER_BYTES
        group.append(piece)
        size += cost
    if group:
        yield group


def digest_of(data: Buffer) -> str:
    """XXH3-128 (hex)."""
    return xxhash.xxh3_128_hexdigest(data)


def build_pack(pieces: Sequence[Piece], digests: Sequence[str] | None = None) -> Pack:
    """Lay out one pack. ``digests`` are those of the pieces' bytes, if they are known already."""
    known = digests if digests is not None else [digest_of(piece.data) for piece in pieces]
    header: dict[str, object] = {"__metadata__": {"format": "torchrelay/pack/1", "xxh3_128": " ".join(known)}}
    position = 0
    for piece in pieces:
        code, item = DTYPES[piece.dtype]
        count = len(piece.data) if code == "U8" else len(piece.data) // item
        header[piece.name] = {"dtype": code, "shape": [count], "data_offsets": [position, position + len(piece.data)]}
        position += len(piece.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % HEADER_BYTES)
    head = memoryview(len(text).to_bytes(8, "little") + text)
    offset, placed = len(head), []
    for piece, digest in zip(pieces, known, strict=True):
        placed.append((piece, offset, digest))
        offset += len(piece.data)
    return Pack(PackInfo(digest_of(head), offset), (head, *(piece.data for piece in pieces)), tuple(placed))


def problem_of_pack(data: memoryview, info: PackInfo) -> str:
    """Say what is wrong with a pack's bytes; empty if its name proves all of them."""
    if len(data) != info.size_bytes:
        return f"it has {len(data)} bytes instead of {info.size_bytes}"
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data) or digest_of(data[:start]) != info.digest:
        return "the XXH3-128 of its header is not its name"
    header: dict[str, Any] = json.loads(bytes(data[8:start]))
    digests = header.pop("__metadata__")["xxh3_128"].split()
    for name, digest in zip(header, digests, strict=True):
        low, high = header[name]["data_offsets"]
        if digest_of(data[start + low : start + high]) != digest:
            return f"the XXH3-128 of the chunk {name} is not {digest}"
    return ""
