"""Packs, records and manifests: valid files, exact cover, and a cost that grows with the ranks only."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from tests.checkpointing import RUN, begin, contents, expected, make_shards, new_run, write
from torchrelay.checkpoint.commit import commit_manifest, write_shard
from torchrelay.checkpoint.cover import check_cover
from torchrelay.checkpoint.layout import DTYPES, PACK_BYTES, ManifestRef, parse_generation_key, parse_manifest_key
from torchrelay.checkpoint.manifest import Box, Chunk, Manifest, PackInfo, ShardRecord, TensorMeta
from torchrelay.checkpoint.pack import Piece, build_pack, group_pieces
from torchrelay.checkpoint.reader import list_checkpoints, load_manifest, load_record
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.memory import MemoryStore
from torchrelay.testing.faulty_store import FaultyStore

_REF = ManifestRef(5, 1)


def _piece(name: str, data: bytes, dtype: str = "uint8") -> Piece:
    return Piece(name, dtype, 0, 0, memoryview(data))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_pack_is_a_safetensors_file(dtype: str) -> None:
    """The reference reader gives back each chunk under its name; types it does not know are bytes to it."""
    random = np.random.default_rng(7)
    one, two = random.bytes(64), random.bytes(160)
    if dtype == "bool":
        one, two = bytes(byte & 1 for byte in one), bytes(byte & 1 for byte in two)
    pack = build_pack([_piece('a/"quoted"@0', one, dtype), _piece("b@64", two, dtype)])
    data = b"".join(pack.parts)
    assert len(data) == pack.info.size_bytes
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header['a/"quoted"@0']["dtype"] == DTYPES[dtype][0]
    for _, offset, _ in pack.placed:
        assert offset % 8 == 0
    if dtype.startswith(("float8", "bfloat16")) and DTYPES[dtype][0] != "U8":
        return  # NumPy has no such type to read it into
    read = load(data)
    assert read['a/"quoted"@0'].tobytes() == one
    assert read["b@64"].tobytes() == two


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=60), st.integers(3000, 20_000))
def test_pieces_are_grouped_in_order_and_within_the_limit(sizes: list[int], limit: int) -> None:
    """No pack is larger than the limit unless one piece is; none is lost or moved."""
    pieces = [_piece(f"t@{number}", bytes(size)) for number, size in enumerate(sizes)]
    groups = list(group_pieces(pieces, limit_bytes=limit))
    assert [piece.name for group in groups for piece in group] == [piece.name for piece in pieces]
    for group in groups:
        assert build_pack(group).info.size_bytes <= limit or len(group) == 1


def test_the_largest_chunk_fits_into_a_pack_many_times() -> None:
    """A pack of full chunks stays below the size at which a PUT would need parts."""
    from torchrelay.checkpoint.layout import CHUNK_BYTES

    pieces = [_piece(f"t@{number}", bytes(CHUNK_BYTES)) for number in range(20)]
    sizes = [build_pack(group).info.size_bytes for group in group_pieces(pieces)]
    assert max(sizes) <= PACK_BYTES
    assert len(sizes) == 2


def test_documents_come_back_equal() -> None:
    """A record and a manifest survive the way through bytes, also with odd names and numbers."""
    box = Box("modèle/w", (0, 0), (2, 3), (Chunk(0, 24, 0, 96, "ab" * 16),))
    record = ShardRecord(
        run_id=RUN, ref=_REF, rank=0, world_size=1, packs=(PackInfo("cd" * 16, 120),), boxes=(box,), local={"a": [1]}
    )
    assert ShardRecord.from_bytes(record.to_bytes(), where="x") == record
    manifest = Manifest(
        run_id=RUN,
        ref=_REF,
        world_size=1,
        begin=ManifestRef(2, 1),
        tensors={"modèle/w": TensorMeta("float32", (2, 3))},
        state={"$float": "nan"},
        trace=((1, None), (2, 0.5)),
    )
    assert Manifest.from_bytes(manifest.to_bytes(), where="x") == manifest
    with pytest.raises(CorruptionError, match="outside its pack"):
        ShardRecord.from_bytes(replace(record, packs=(PackInfo("cd" * 16, 100),)).to_bytes(), where="x")


def _cover(meta: TensorMeta, *boxes: Box) -> None:
    records = [
        ShardRecord(run_id=RUN, ref=_REF, rank=rank, world_size=len(boxes), packs=(), boxes=(box,))
        for rank, box in enumerate(boxes)
    ]
    check_cover({"t": meta}, records)


def _box(corner: tuple[int, ...], extent: tuple[int, ...], *spans: tuple[int, int], name: str = "t") -> Box:
    return Box(name, corner, extent, tuple(Chunk(start, length, 0, 0, "") for start, length in spans))


def test_a_cover_may_be_cut_in_every_way() -> None:
    """By bytes over ranks, by rows, by columns, in blocks; empty and scalar tensors too."""
    meta = TensorMeta("float32", (4, 4))
    _cover(meta, _box((0, 0), (4, 4), (0, 40)), _box((0, 0), (4, 4), (40, 24)))
    _cover(meta, _box((0, 0), (3, 4), (0, 48)), _box((3, 0), (1, 4), (0, 16)))
    _cover(meta, _box((0, 0), (4, 1), (0, 16)), _box((0, 1), (4, 3), (0, 48)))
    blocks = [_box((row, column), (2, 2), (0, 16)) for row in (0, 2) for column in (0, 2)]
    _cover(meta, *blocks)
    _cover(TensorMeta("float32", ()), _box((), (), (0, 4)))
    _cover(TensorMeta("float32", (0, 4)), _box((0, 0), (0, 4)))


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([_box((0, 0), (4, 4), (0, 40))], "40 of 64 bytes"),
        ([_box((0, 0), (4, 4), (0, 40)), _box((0, 0), (4, 4), (44, 20))], "nowhere"),
        ([_box((0, 0), (4, 4), (0, 40)), _box((0, 0), (4, 4), (36, 28))], "twice"),
        ([_box((0, 0), (4, 4), (0, 64)), _box((0, 0), (4, 4), (0, 64))], "twice"),
        ([_box((0, 0), (3, 4), (0, 48))], "do not add up"),
        ([_box((0, 0), (3, 4), (0, 48)), _box((2, 0), (1, 4), (0, 16))], "overlap"),
        ([_box((0, 0), (2, 4), (0, 32)), _box((3, 0), (2, 4), (0, 32))], "outside"),
        ([_box((0,), (16,), (0, 64))], "dimensions"),
        ([_box((0, 0), (4, 4), (0, 64)), _box((0, 0), (1, 1), (0, 4), name="u")], "not in the table"),
        ([_box((0, 0), (2, 3), (0, 24)), _box((0, 2), (4, 2), (0, 32)), _box((2, 0), (2, 1), (0, 8))], "overlap"),
    ],
)
def test_what_is_missing_double_or_outside_is_not_committed(boxes: list[Box], words: str) -> None:
    """Each way in which the parts of a tensor can fail to be the tensor."""
    with pytest.raises(CorruptionError, match=words):
        _cover(TensorMeta("float32", (4, 4)), *boxes)


def test_a_pack_that_did_not_arrive_stops_the_commit() -> None:
    """The records are complete, but an object they name is missing or has another size."""
    for spoil in (None, b"short"):
        store = MemoryStore()
        new_run(store)
        write(store, _REF)
        key = store.list(f"runs/{RUN}/packs/").objects[0].key
        if spoil is None:
            store.delete([key])
        else:
            store.put(key, spoil)
        with pytest.raises(CorruptionError, match="pack"):
            commit_manifest(store, RUN, _REF)
        assert list_checkpoints(store, RUN) == []


@pytest.mark.parametrize("world_size", [1, 7, 64])
def test_any_number_of_ranks_can_write_one_checkpoint(world_size: int) -> None:
    """Also more ranks than there are bytes to divide: some write an empty part."""
    store = MemoryStore()
    new_run(store)
    write(store, _REF, world_size=world_size)
    manifest = commit_manifest(store, RUN, _REF)
    assert manifest is not None
    assert len(manifest.records) == world_size
    assert begin(store).begin == _REF


def test_a_thousand_ranks_commit_with_one_read_each() -> None:
    """The committer's calls: one per record, and a handful more; the manifest grows by a line per rank."""
    ranks = 1000
    store = MemoryStore()
    new_run(store)
    write(store, _REF, world_size=ranks)
    counted = FaultyStore(store)
    manifest = commit_manifest(counted, RUN, _REF)
    assert manifest is not None
    assert counted.calls <= ranks + 8
    assert len(manifest.to_bytes()) < 150 * ranks


@pytest.mark.parametrize("step", [0, 7, 10**12 - 1, 10**15])
def test_names_sort_like_numbers(step: int) -> None:
    """Byte order is numeric order up to 10^12 steps; longer names are still read."""
    ref = ManifestRef(step, 3)
    assert parse_manifest_key(ref.key(RUN)) == ref
    if 0 < step < 10**12:
        assert ManifestRef(step - 1, 9).key(RUN) < ref.key(RUN)
    assert parse_manifest_key(ref.key(RUN) + ".tmp") is None
    assert parse_generation_key(f"runs/{RUN}/generations/x.json") is None


def test_shards_made_here_divide_everything() -> None:
    """The helper of these tests is itself a cover."""
    shards = make_shards(_REF, world_size=3)
    assert sum(shard.size_bytes for shard in shards) == 4 * (35 + 3 + 35 + 1)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_dead_replica_costs_no_checkpoint_where_the_run_allows_it(allowed: bool) -> None:
    """Rank 1 of 2 held nothing of its own and dies before its record: with leave, what is there is committed; without, or while it may come, not."""
    store = MemoryStore()
    new_run(store)
    whole = make_shards(_REF, world_size=1)[0]
    head = {**(whole.head or {}), "world_size": 2, "info": {"partial_commits": True} if allowed else {}}
    with ThreadPoolExecutor(1) as executor:
        write_shard(store, replace(whole, world_size=2, head=head), executor=executor)
    assert commit_manifest(store, RUN, _REF) is None
    committed = commit_manifest(store, RUN, _REF, partial=True)
    assert (committed is not None) == allowed
    if committed is not None:
        assert contents(store, _REF) == expected(_REF)
        with pytest.raises(NotFoundError, match="rank 1 had died"):
            load_record(store, load_manifest(store, RUN, _REF), 1)


def test_a_part_that_is_missing_is_never_committed() -> None:
    """Rank 1 of 2 held part of the state: no leave helps."""
    store = MemoryStore()
    new_run(store)
    first, _ = make_shards(_REF, world_size=2)
    with ThreadPoolExecutor(1) as executor:
        head = {**(first.head or {}), "info": {"partial_commits": True}}
        write_shard(store, replace(first, head=head), executor=executor)
    assert commit_manifest(store, RUN, _REF, partial=True) is None
