"""Each byte of each object of a run is spoilt in turn: told, or without any effect; never a wrong value."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.checkpointing import RUN, begin, contents, expected, latest, new_run, save
from torchrelay.checkpoint.commit import Shard, commit_manifest, write_shard
from torchrelay.checkpoint.layout import ManifestRef, generations_prefix, packs_prefix, records_prefix, run_key
from torchrelay.checkpoint.manifest import Manifest, TensorMeta
from torchrelay.checkpoint.pack import Piece
from torchrelay.checkpoint.reader import load_manifest, mark_damaged, verify_checkpoint
from torchrelay.checkpoint.regions import read_tensors
from torchrelay.errors import ConfigError, CorruptionError, TorchrelayError
from torchrelay.store.memory import MemoryStore

_REF = ManifestRef(10, 1)
_VALUE = np.arange(6 * 4, dtype=np.int16).reshape(6, 4)


@pytest.fixture
def divided() -> MemoryStore:
    """A checkpoint of one tensor that three ranks hold by uneven boxes, one of them cut by columns."""
    store = MemoryStore()
    new_run(store)
    table = {"w": TensorMeta("int16", _VALUE.shape)}
    head = Manifest(run_id=RUN, ref=_REF, world_size=3, begin=None, tensors=table, state={"w": {"$tensor": "w"}}).head()
    boxes = [((0, 0), (4, 3)), ((0, 3), (4, 1)), ((4, 0), (2, 4))]
    with ThreadPoolExecutor(1) as executor:
        for rank, (corner, extent) in enumerate(boxes):
            own = _VALUE[corner[0] : corner[0] + extent[0], corner[1] : corner[1] + extent[1]].tobytes()
            shard = Shard(
                run_id=RUN,
                ref=_REF,
                rank=rank,
                world_size=3,
                tensors=table,
                boxes=(("w", corner, extent),),
                pieces=(Piece(f"w{corner}@0", "int16", 0, 0, memoryview(own)),),
                head=None if rank else head,
            )
            write_shard(store, shard, executor=executor)
    assert commit_manifest(store, RUN, _REF) is not None
    return store


def _read(store: MemoryStore) -> bytes:
    buffer = bytearray(_VALUE.nbytes)
    read_tensors(store, load_manifest(store, RUN, _REF), {"w": memoryview(buffer)}, threads=1)
    return bytes(buffer)


def _places(data: bytes, *, long: bool) -> list[int]:
    """All bytes, but of the blanks that fill up a header only some; four times as many of them in the long form."""
    step = 16 if long else 64
    return [place for place, byte in enumerate(data) if byte != ord(" ") or place % step == 0]


@pytest.mark.parametrize("bits", [(0,), pytest.param(range(8), marks=pytest.mark.drill)])
@pytest.mark.parametrize("kind", ["manifest", "record", "pack"])
def test_a_divided_checkpoint(divided: MemoryStore, kind: str, bits: tuple[int, ...]) -> None:
    """Summaries, details, padding: `verify` refuses every flip, and a load that does not has the right bytes."""
    prefix = {"manifest": _REF.key(RUN), "record": records_prefix(RUN, _REF), "pack": packs_prefix(RUN, _REF)}[kind]
    keys = [item.key for item in divided.list(prefix).objects]
    assert len(keys) == (1 if kind == "manifest" else 3)
    for key in keys:
        good = bytes(divided.get(key))
        for place in _places(good, long=len(bits) > 1):
            for bit in bits:
                divided.put(key, good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :])
                with pytest.raises((CorruptionError, ConfigError)):  # a higher version of the format is refused as such
                    verify_checkpoint(divided, RUN, _REF)
                try:
                    assert _read(divided) == _VALUE.tobytes(), (key, place, bit)
                except (CorruptionError, ConfigError):
                    pass
        divided.put(key, good)
    assert _read(divided) == _VALUE.tobytes()


@pytest.mark.parametrize("kind", ["run", "generation"])
def test_the_records_of_run_and_generation(kind: str) -> None:
    """A start that goes on begins at the checkpoint that counts, above every number that was given; else it says that it cannot."""
    store = MemoryStore()
    new_run(store)
    save(store, _REF)
    begin(store)
    later = ManifestRef(20, 2)
    save(store, later)
    before = {item.key: bytes(store.get(item.key)) for item in store.list("").objects}
    key = run_key(RUN) if kind == "run" else [item.key for item in store.list(generations_prefix(RUN)).objects][-1]
    for place in range(len(before[key])):
        copy = MemoryStore()
        for name, data in before.items():
            copy.put(name, data)
        copy.put(key, before[key][:place] + bytes([before[key][place] ^ 1]) + before[key][place + 1 :])
        try:
            claim = new_run(copy)
        except TorchrelayError:
            continue  # it says that it cannot
        assert claim.generation == 3, place
        assert claim.begin in ((later,) if kind == "run" else (_REF, later)), place
        assert claim.begin is not None
        assert contents(copy, claim.begin) == expected(claim.begin)
        assert claim.begin == later or claim.notices, place


def test_what_a_damage_mark_says_is_not_needed() -> None:
    """The mark is its name: no flip in it brings a damaged checkpoint back."""
    store = MemoryStore()
    new_run(store)
    for step in (10, 20):
        save(store, ManifestRef(step, 1))
    mark_damaged(store, RUN, ManifestRef(20, 1), "a test")
    (key,) = [item.key for item in store.list(f"runs/{RUN}/verdicts/").objects]
    good = bytes(store.get(key))
    for place in range(len(good)):
        store.put(key, good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert latest(store) == _REF
    store.put(key, b"")
    assert latest(store) == _REF
