"""Reading any part of any tensor of a checkpoint, whatever ranks wrote it: only the chunks that are needed, hashed as they arrive.

A region is a box of one tensor and the memory it goes to. Records are read nearest rank first and only until all regions are found, so that
planning costs O(own tensors) where the layout has not changed. Chunks that lie side by side in a pack are fetched by one GET, straight into
place where their places lie side by side too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from torchrelay.checkpoint.layout import DTYPES
from torchrelay.checkpoint.manifest import Box, Chunk, Manifest, ShardRecord
from torchrelay.checkpoint.pack import digest_of
from torchrelay.checkpoint.reader import load_record
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.base import ObjectStore

__all__ = ["Fetch", "Region", "Sharing", "place_fetch", "read_fetch", "read_regions", "read_tensors"]

_READ_BYTES = 16 * 2**20  # adjacent chunks of a pack are fetched by one GET up to this size
_SMALL_BYTES = 2**20  # up to this size also if their places are apart, at the price of a copy
_THREADS = 8
_Corner = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of one tensor and the writable memory of exactly its bytes, row-major. ``shared``: all ranks of this host read the same."""

    tensor: str
    corner: tuple[int, ...]
    extent: tuple[int, ...]
    target: memoryview
    shared: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk goes: all of it to ``start`` of a region's memory, or by ``put`` wherever its parts belong."""

    region: Region
    start: int
    put: Callable[[memoryview], None] | None


@dataclass(slots=True)
class Fetch:
    """One ranged GET: bytes ``[offset, offset + length)`` of a pack, the chunks in it and the places of each."""

    key: str
    offset: int
    length: int
    chunks: list[tuple[Chunk, list[_Place]]] = field(default_factory=list)

    @property
    def direct(self) -> memoryview | None:
        """The one piece of memory that takes all of it as it is, if there is one."""
        first = self.chunks[0][1][0]
        position = first.start
        for chunk, places in self.chunks:
            if len(places) > 1 or places[0].put or places[0].region is not first.region or places[0].start != position:
                return None
            position += chunk.length
        return first.region.target[first.start : position]

    @property
    def shared(self) -> bool:
        """Whether all ranks of the host fetch the same; then all of it is somewhere in place as it is."""
        return all(places[0].region.shared and places[0].put is None for _, places in self.chunks)

    def in_place(self) -> Iterator[memoryview]:
        """The bytes of a shared fetch, from where they have been put."""
        for chunk, places in self.chunks:
            yield places[0].region.target[places[0].start : places[0].start + chunk.length]


class Sharing(Protocol):
    """How ranks of one host read for each other (see ``sharing``)."""

    rank: int
    ranks: int

    def try_fetch(self, store: ObjectStore, fetch: Fetch) -> int | None:
        """Fetch a range unless another rank is at it; returns the bytes that came from the store, None to be taken later."""

    def take(self, store: ObjectStore, fetch: Fetch) -> int:
        """Take a range that another rank has claimed; returns the bytes that came from the store."""


def read_tensors(
    store: ObjectStore, manifest: Manifest, buffers: Mapping[str, memoryview], *, threads: int = _THREADS
) -> int:
    """Fill one writable byte buffer per wanted tensor with its elements (row-major, little-endian). Returns the bytes fetched."""
    tensors = manifest.tensors
    regions = [
        Region(name, (0,) * len(tensors[name].shape), tensors[name].shape, data) for name, data in buffers.items()
    ]
    return read_regions(store, manifest, regions, threads=threads)


def read_regions(
    store: ObjectStore,
    manifest: Manifest,
    regions: Sequence[Region],
    *,
    near: float = 0.0,
    threads: int = _THREADS,
    sharing: Sharing | None = None,
) -> int:
    """Fill every region and return the bytes fetched.

    ``near`` in [0, 1) says where among the ranks this one stands: records of ranks there are looked at first. ``sharing`` lets ranks of one host read
    shared regions for each other. Every chunk is hashed before this returns; on CorruptionError the content of the regions is undefined.
    """
    by_tensor: dict[str, list[Region]] = {}
    missing = 0
    for region in regions:
        if region.target.nbytes:
            by_tensor.setdefault(region.tensor, []).append(region)
            missing += region.target.nbytes
    with ThreadPoolExecutor(threads, thread_name_prefix="restore") as executor:
        reads, shared = [], list[Fetch]()
        for record in _nearest(store, manifest, near, executor):
            if not missing:
                break
            wanted: dict[tuple[int, int], tuple[Chunk, list[_Place]]] = {}
            for box in record.boxes:
                for region in by_tensor.get(box.tensor, ()):
                    missing -= _plan(box, region, manifest, wanted)
            for fetch in _coalesce(record, list(wanted.values())):
                if sharing is not None and fetch.shared:
                    shared.append(fetch)
                else:
                    reads.append(executor.submit(read_fetch, store, fetch))
        fetched = sum(read.result() for read in reads)
        if sharing is not None:
            fetched += _read_shared(store, shared, sharing, executor)
    if missing:
        raise CorruptionError(f"the records of {manifest.key} lack {missing} of the bytes that were asked for")
    return fetched


def _read_shared(store: ObjectStore, fetches: list[Fetch], sharing: Sharing, executor: Executor) -> int:
    """Fetch what nobody else has claimed, beginning at this rank's share; then take the rest."""
    first = len(fetches) * sharing.rank // sharing.ranks
    fetches = fetches[first:] + fetches[:first]
    sizes = list(executor.map(lambda fetch: sharing.try_fetch(store, fetch), fetches))
    left = [fetch for fetch, size in zip(fetches, sizes, strict=True) if size is None]
    return sum(size or 0 for size in sizes) + sum(executor.map(lambda fetch: sharing.take(store, fetch), left))


def _nearest(store: ObjectStore, manifest: Manifest, near: float, executor: Executor) -> Iterator[ShardRecord]:
    """Yield the records, those of the nearest ranks and of rank 0 (which keeps small replicated tensors) first, read in growing batches."""
    world = max(1, manifest.world_size)
    ranks = sorted(
        (record.rank for record in manifest.records), key=lambda rank: (abs((rank + 0.5) / world - near), rank)
    )
    ranks = [*ranks[:1], *(rank for rank in ranks[1:] if rank == 0), *(rank for rank in ranks[1:] if rank)]
    size = 2
    while ranks:
        batch, ranks = ranks[:size], ranks[size:]
        yield from executor.map(lambda rank: load_record(store, manifest, rank), batch)
        size *= 2


def _plan(
    box: Box, region: Region, manifest: Manifest, wanted: dict[tuple[int, int], tuple[Chunk, list[_Place]]]
) -> int:
    """Add the chunks of a box that a region needs; returns the bytes of the region that they hold."""
    item = DTYPES[manifest.tensors[box.tensor].dtype][1]
    if _intersection(box.corner, box.extent, region.corner, region.extent) is None:
        return 0
    rows = box.extent[1:] == region.extent[1:] and box.corner[1:] == region.corner[1:]
    row = math.prod(box.extent[1:]) * item
    shift = (box.corner[0] - region.corner[0]) * row if box.corner else 0
    found = 0
    for chunk in box.chunks:
        if rows:
            size, place = _in_rows(chunk, shift + chunk.start, region)
        else:
            size, place = _in_boxes(chunk, box, region, item)
        if place is not None:
            found += size
            wanted.setdefault((chunk.pack, chunk.offset), (chunk, []))[1].append(place)
    return found


def _in_rows(chunk: Chunk, start: int, region: Region) -> tuple[int, _Place | None]:
    """Place a chunk that is one range of the region's bytes, from ``start`` (which may lie before its beginning)."""
    low, high = max(0, start), min(region.target.nbytes, start + chunk.length)
    if low >= high:
        return 0, None
    if high - low == chunk.length:
        return chunk.length, _Place(region, start, None)

    def put(data: memoryview) -> None:
        region.target[low:high] = data[low - start : high - start]

    return high - low, _Place(region, start, put)


def _in_boxes(chunk: Chunk, box: Box, region: Region, item: int) -> tuple[int, _Place | None]:
    """Place a chunk whose bytes lie scattered in the region: by the boxes that its range of the row-major order consists of."""
    copies: list[tuple[int, _Corner, tuple[slice, ...], tuple[slice, ...]]] = []
    size = 0
    first = chunk.start // item
    for corner, extent, position in _boxes_of_range(box.extent, first, first + chunk.length // item):
        place = tuple(low + origin for low, origin in zip(corner, box.corner, strict=True))
        common = _intersection(place, extent, region.corner, region.extent)
        if common is None:
            continue
        low, shared = common
        source = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, place, shared, strict=True))
        target = tuple(slice(a - b, a - b + n) for a, b, n in zip(low, region.corner, shared, strict=True))
        copies.append(((position - first) * item, extent, source, target))
        size += math.prod(shared) * item

    def put(data: memoryview) -> None:
        whole = np.frombuffer(region.target, dtype=f"V{item}").reshape(region.extent)
        for offset, extent, source, target in copies:
            part = np.frombuffer(data, dtype=f"V{item}", count=math.prod(extent), offset=offset).reshape(extent)
            whole[target] = part[source]

    return (size, _Place(region, 0, put)) if copies else (0, None)


def _boxes_of_range(extent: _Corner, first: int, last: int) -> Iterator[tuple[_Corner, _Corner, int]]:
    """Cut elements [first, last) of a box's row-major order into boxes: yields (corner, extent, first element), at most 2 * dimensions - 1."""
    if first >= last:
        return
    if len(extent) <= 1:
        yield ((first,) * len(extent), (last - first,) * len(extent), first)
        return
    row = math.prod(extent[1:])
    head, tail = -(-first // row), last // row
    if head > tail:  # within one row
        yield from _in_row(extent, head - 1, first, last)
        return
    if first < head * row:
        yield from _in_row(extent, head - 1, first, head * row)
    if head < tail:
        yield ((head,) + (0,) * (len(extent) - 1), (tail - head, *extent[1:]), head * row)
    if tail * row < last:
        yield from _in_row(extent, tail, tail * row, last)


def _in_row(extent: _Corner, number: int, first: int, last: int) -> Iterator[tuple[_Corner, _Corner, int]]:
    base = number * math.prod(extent[1:])
    for corner, part, position in _boxes_of_range(extent[1:], first - base, last - base):
        yield (number, *corner), (1, *part), base + position


def _intersection(
    corner_a: _Corner, extent_a: _Corner, corner_b: _Corner, extent_b: _Corner
) -> tuple[_Corner, _Corner] | None:
    low = tuple(max(a, b) for a, b in zip(corner_a, corner_b, strict=True))
    size = tuple(
        min(a + n, b + m) - start for a, n, b, m, start in zip(corner_a, extent_a, corner_b, extent_b, low, strict=True)
    )
    return (low, size) if all(n > 0 for n in size) else None


def _coalesce(record: ShardRecord, wanted: Sequence[tuple[Chunk, list[_Place]]]) -> list[Fetch]:
    """Join chunks that lie side by side in a pack into one GET."""
    fetches: list[Fetch] = []
    keys = record.pack_keys()
    last: Chunk | None = None
    for chunk, places in sorted(wanted, key=lambda pair: (pair[0].pack, pair[0].offset)):
        fetch = fetches[-1] if fetches else None
        if fetch is not None and last is not None and _joins(fetch, last, chunk, places[0]):
            fetch.length += chunk.length
            fetch.chunks.append((chunk, places))
        else:
            fetches.append(Fetch(keys[chunk.pack], chunk.offset, chunk.length, [(chunk, places)]))
        last = chunk
    return fetches


def _joins(fetch: Fetch, last: Chunk, chunk: Chunk, place: _Place) -> bool:
    if (chunk.pack, chunk.offset) != (last.pack, last.offset + last.length):
        return False
    size = fetch.length + chunk.length
    before = fetch.chunks[-1][1][0]
    in_place = (
        place.put is None
        and before.put is None
        and place.region is before.region
        and place.start == before.start + last.length
    )
    return size <= (_READ_BYTES if in_place else _SMALL_BYTES)


def read_fetch(store: ObjectStore, fetch: Fetch) -> int:
    """Do one GET, hash every chunk and put it into place; once more if a hash is wrong, so that a bit flipped on the wire costs no checkpoint."""
    bad = None
    into = fetch.direct
    for _ in range(2):
        try:
            data = store.get(fetch.key, offset=fetch.offset, length=fetch.length, into=into)
        except NotFoundError:
            raise CorruptionError(f"{fetch.key} is missing") from None
        bad = place_fetch(fetch, data, placed=into is not None)
        if bad is None:
            return fetch.length
    assert bad is not None
    raise CorruptionError(f"{fetch.key} is damaged at byte {bad.offset}: its XXH3-128 is not {bad.digest}")


def place_fetch(fetch: Fetch, data: memoryview, *, placed: bool) -> Chunk | None:
    """Check the bytes of a fetch and put them into place (unless they were read there); returns the first chunk whose hash is wrong."""
    for chunk, places in fetch.chunks:
        part = data[chunk.offset - fetch.offset : chunk.offset - fetch.offset + chunk.length]
        if digest_of(part) != chunk.digest:
            return chunk
        for place in () if placed else places:
            if place.put is not None:
                place.put(part)
            else:
                place.region.target[place.start : place.start + chunk.length] = part
    return None
