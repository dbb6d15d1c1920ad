"""Packs read by the rule of the safetensors format alone, and tensors cut in every way: whole is accepted, anything else refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import safe_open

from torchrelay.checkpoint.cover import check_cover
from torchrelay.checkpoint.layout import CHUNK_BYTES, DTYPES, PACK_BYTES, ManifestRef
from torchrelay.checkpoint.manifest import Box, Chunk, PackInfo, ShardRecord, TensorMeta
from torchrelay.checkpoint.pack import Piece, build_pack, group_pieces, problem_of_pack
from torchrelay.errors import CorruptionError

_KNOWN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8, "BOOL": 1}
_KNOWN |= {f"{sign}{8 * size}": size for sign in "IU" for size in (1, 2, 4, 8)}

_CUTS = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.integers(0, 40)), min_size=1, max_size=8)


def _parse(data: bytes) -> dict[str, bytes]:
    """Read a safetensors file as its page says: length, header, and entries that tile the rest without a hole."""
    length = int.from_bytes(data[:8], "little")
    assert length <= 100_000_000
    assert data[8:9] == b"{"
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert all(isinstance(word, str) for pair in metadata.items() for word in pair)
    body, position, found = data[8 + length :], 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == position
        assert end - begin == math.prod(entry["shape"]) * _KNOWN[entry["dtype"]]
        found[name], position = body[begin:end], end
    assert position == len(body)
    return found


@given(_CUTS, st.data())
def test_a_pack_is_read_by_the_rule_of_its_format(cuts: list[tuple[str, int]], data: st.DataObject) -> None:
    """Any names, element types and lengths: each chunk under its name, at the place and with the digest that the record gets."""
    names = data.draw(st.lists(st.text().filter(lambda name: name != "__metadata__"), min_size=len(cuts), unique=True))
    bodies = [data.draw(st.binary(min_size=n * DTYPES[dtype][1], max_size=n * DTYPES[dtype][1])) for dtype, n in cuts]
    pieces = [
        Piece(name, dtype, 0, 0, memoryview(body)) for name, (dtype, _), body in zip(names, cuts, bodies, strict=False)
    ]
    pack = build_pack(pieces)
    file = b"".join(pack.parts)
    assert _parse(file) == {piece.name: bytes(piece.data) for piece in pieces}
    start = 8 + int.from_bytes(file[:8], "little")
    assert pack.info == PackInfo(xxhash.xxh3_128_hexdigest(file[:start]), len(file))
    assert problem_of_pack(memoryview(file), pack.info) == ""
    for place in range(len(file)):
        bad = bytearray(file)
        bad[place] ^= 1 << data.draw(st.integers(0, 7)) if place < 4 else 1
        assert problem_of_pack(memoryview(bad), pack.info)
    for piece, offset, digest in pack.placed:
        assert file[offset : offset + len(piece.data)] == piece.data
        assert xxhash.xxh3_128_hexdigest(piece.data) == digest


def test_equal_pieces_make_one_object_and_any_change_another() -> None:
    """The name is the content: names, types and bytes."""
    one = build_pack([Piece("a", "uint8", 0, 0, memoryview(b"xy"))]).info
    assert build_pack([Piece("a", "uint8", 3, 9, memoryview(bytearray(b"xy")))]).info == one
    for other in (("b", "uint8", b"xy"), ("a", "int8", b"xy"), ("a", "uint8", b"xz")):
        assert build_pack([Piece(other[0], other[1], 0, 0, memoryview(other[2]))]).info.digest != one.digest


@given(
    st.lists(st.tuples(st.text(max_size=60), st.integers(0, 300)), min_size=1, max_size=60),
    st.integers(1500, 6000),
    st.sampled_from(sorted(DTYPES)),
)
def test_names_count_towards_the_limit(named: list[tuple[str, int]], limit: int, dtype: str) -> None:
    """A header grows with its names, and each of their letters may take twelve bytes there; the limit is on the whole object."""
    item = DTYPES[dtype][1]
    pieces = [
        Piece(f"{name}@{number}", dtype, 0, 0, memoryview(bytes(size * item)))
        for number, (name, size) in enumerate(named)
    ]
    groups = list(group_pieces(pieces, limit_bytes=limit))
    assert [piece for group in groups for piece in group] == pieces
    for group in groups:
        assert group
        assert len(group) == 1 or build_pack(group).info.size_bytes <= limit


def test_no_pack_of_a_large_shard_is_over_64_mib(tmp_path: Any) -> None:
    """Chunks as large as they come, names as long as they come, many small ones between; the library itself opens the file."""
    whole, small = memoryview(bytes(CHUNK_BYTES)), memoryview(bytes(64))
    pieces = [
        Piece(f"{'layer.' * 30}{number}@0", "float32", 0, 0, small if number % 40 else whole) for number in range(2000)
    ]
    packs = [build_pack(group) for group in group_pieces(pieces)]
    assert sum(len(pack.placed) for pack in packs) == len(pieces)
    assert PACK_BYTES == 64 * 2**20
    assert PACK_BYTES - 2 * CHUNK_BYTES < max(pack.info.size_bytes for pack in packs) <= PACK_BYTES
    path = tmp_path / "pack.safetensors"
    path.write_bytes(b"".join(packs[0].parts))
    with safe_open(path, framework="np") as file:
        assert list(file.keys()) == sorted(piece.name for piece, _, _ in packs[0].placed)


@st.composite
def _cut_tensors(draw: st.DrawFn) -> tuple[TensorMeta, list[Box]]:
    """A tensor, cut into boxes along any of its dimensions, and the bytes of each box into chunks."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    meta = TensorMeta(draw(st.sampled_from(["float32", "bfloat16", "bool", "complex128"])), shape)
    blocks = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        corner, extent = blocks.pop(draw(st.integers(0, len(blocks) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        low = draw(st.integers(0, extent[axis]))
        for start, size in ((0, low), (low, extent[axis] - low)):
            parts = [list(corner), list(extent)]
            parts[0][axis] += start
            parts[1][axis] = size
            blocks.append((tuple(parts[0]), tuple(parts[1])))
    return meta, [Box("t", *block, tuple(draw(_chunks(meta, block[1])))) for block in dict.fromkeys(blocks)]


@st.composite
def _chunks(draw: st.DrawFn, meta: TensorMeta, extent: tuple[int, ...]) -> list[Chunk]:
    size = math.prod(extent) * DTYPES[meta.dtype][1]
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    return [Chunk(low, high - low, 0, 0, "") for low, high in pairwise(edges)]


def _check(meta: TensorMeta, boxes: list[Box]) -> None:
    """Check boxes that are dealt to two ranks in turn."""
    records = [
        ShardRecord(run_id="r", ref=ManifestRef(1, 1), rank=rank, world_size=2, packs=(), boxes=tuple(boxes[rank::2]))
        for rank in range(2)
    ]
    check_cover({"t": meta}, records)


def _times_stored(meta: TensorMeta, boxes: list[Box]) -> set[int]:
    """Count, byte by byte, how often each is stored; a box that sticks out gives -1."""
    item = DTYPES[meta.dtype][1]
    counts = {(*place, byte): 0 for place in product(*map(range, meta.shape)) for byte in range(item)}
    for box in boxes:
        inside = list(product(*(range(low, low + size) for low, size in zip(box.corner, box.extent, strict=True))))
        for byte in (number for chunk in box.chunks for number in range(chunk.start, chunk.start + chunk.length)):
            place = (*inside[byte // item], byte % item) if byte < len(inside) * item else None
            if place not in counts:
                return {-1}
            counts[place] += 1
    return set(counts.values())


def _fit(meta: TensorMeta, boxes: list[Box]) -> bool:
    """Tell whether parts, empty ones too, lie inside the tensor and have room for just the bytes stored; equal parts are one."""
    stored = Counter[tuple[tuple[int, ...], tuple[int, ...]]]()
    for box in boxes:
        stored[box.corner, box.extent] += sum(chunk.length for chunk in box.chunks)
    return all(
        all(low >= 0 and low + size <= full for low, size, full in zip(corner, extent, meta.shape, strict=True))
        and length == math.prod(extent) * DTYPES[meta.dtype][1]
        for (corner, extent), length in stored.items()
    )


@given(_cut_tensors(), st.randoms(use_true_random=False))
def test_a_tensor_may_be_cut_in_any_way_and_order(cut: tuple[TensorMeta, list[Box]], random: Any) -> None:
    """Along any dimension, into any chunks, empty parts among them, in whatever order the ranks wrote them."""
    meta, boxes = cut
    random.shuffle(boxes)
    assert _times_stored(meta, boxes) == {1}
    _check(meta, boxes)


@given(_cut_tensors(), st.data())
def test_a_cut_with_any_one_change_is_refused(cut: tuple[TensorMeta, list[Box]], data: st.DataObject) -> None:
    """One part dropped, doubled, moved or resized, one chunk dropped, moved or resized: refused unless every byte is still there once."""
    meta, boxes = cut
    number = data.draw(st.integers(0, len(boxes) - 1))
    box = boxes[number]
    match data.draw(st.sampled_from(["drop", "double", "box", "chunk", "lose"])):
        case "drop":
            del boxes[number]
        case "double":
            boxes.append(box)
        case "box":
            assume(meta.shape)
            axis, by = data.draw(st.integers(0, len(meta.shape) - 1)), data.draw(st.sampled_from([-1, 1]))
            places = [list(box.corner), list(box.extent)]
            places[data.draw(st.integers(0, 1))][axis] += by
            assume(places[1][axis] >= 0)
            boxes[number] = Box("t", tuple(places[0]), tuple(places[1]), box.chunks)
        case change:
            assume(box.chunks)
            which = data.draw(st.integers(0, len(box.chunks) - 1))
            start, length = box.chunks[which].start, box.chunks[which].length
            start += data.draw(st.integers(-2, 2))
            length += data.draw(st.integers(-2, 2))
            assume(start >= 0 and length >= 0)
            other = () if change == "lose" else (Chunk(start, length, 0, 0, ""),)
            chunks = (*box.chunks[:which], *other, *box.chunks[which + 1 :])
            boxes[number] = Box("t", box.corner, box.extent, chunks)
    if _times_stored(meta, boxes) == {1} and _fit(meta, boxes):
        _check(meta, boxes)
    else:
        with pytest.raises(CorruptionError, match="tensor t: "):
            _check(meta, boxes)
