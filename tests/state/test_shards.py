"""The division of replicated state over ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchrelay.checkpoint.layout import DTYPES
from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.state.shards import Part, ShardPlan, plan_shard

_SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
_TABLES = st.dictionaries(
    st.text("abc", min_size=1, max_size=4), st.builds(TensorMeta, st.sampled_from(sorted(DTYPES)), _SHAPES), max_size=12
)


def _replicated(table: dict[str, TensorMeta], *, rank: int, world_size: int, chunk_bytes: int) -> ShardPlan:
    """The plan of a rank that holds all of every tensor, as all others do."""
    parts = [Part(name, (0,) * len(meta.shape), meta.shape, rank, world_size) for name, meta in table.items()]
    return plan_shard(table, parts, world_size=world_size, chunk_bytes=chunk_bytes)


@given(_TABLES, st.integers(1, 9))
def test_every_byte_belongs_to_exactly_one_rank(table: dict[str, TensorMeta], world_size: int) -> None:
    """Whatever the tensors and the number of ranks, the slices of all ranks tile every tensor."""
    slices = [
        part
        for rank in range(world_size)
        for part in _replicated(table, rank=rank, world_size=world_size, chunk_bytes=48).slices
    ]
    for name, meta in table.items():
        position = 0
        for part in sorted((part for part in slices if part.tensor == name), key=lambda part: part.start):
            assert part.start == position
            position += part.length
        assert position == meta.size_bytes


@given(_TABLES, st.integers(1, 9))
def test_staging_offsets_do_not_overlap_and_are_aligned(table: dict[str, TensorMeta], world_size: int) -> None:
    """Each slice has its own aligned place in the staging area, which is large enough."""
    for rank in range(world_size):
        plan = _replicated(table, rank=rank, world_size=world_size, chunk_bytes=48)
        end = 0
        for part in plan.slices:
            assert part.offset % DTYPES[table[part.tensor].dtype][1] == 0
            assert part.offset >= end
            end = part.offset + part.length
        assert end <= plan.area_bytes


def test_shares_are_even() -> None:
    """With many chunks the ranks' shares differ by at most one chunk."""
    table = {f"t{i}": TensorMeta("float32", (4000,)) for i in range(97)}
    sizes = [_replicated(table, rank=rank, world_size=4, chunk_bytes=4000).size_bytes for rank in range(4)]
    assert max(sizes) - min(sizes) <= 4000
    assert sum(sizes) == 97 * 16000
