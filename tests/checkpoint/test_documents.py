"""Sealed documents: equal after a round trip, and refused when any bit, byte or field of them is not what was written."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpointing import RUN, begin, new_run, save, write
from torchrelay.checkpoint.commit import commit_manifest
from torchrelay.checkpoint.cover import check_cover
from torchrelay.checkpoint.generation import Lease, open_run, read_run, start_generation
from torchrelay.checkpoint.history import Generation, chain, read_history
from torchrelay.checkpoint.layout import (
    DTYPES,
    GenerationKey,
    ManifestRef,
    damage_prefix,
    generation_key,
    lease_key,
    manifests_prefix,
    parse_generation_key,
    parse_manifest_key,
    parse_record_key,
    parse_run_key,
    record_key,
    run_key,
)
from torchrelay.checkpoint.manifest import (
    Box,
    Chunk,
    Manifest,
    PackInfo,
    RecordRef,
    ShardRecord,
    TensorMeta,
)
from torchrelay.checkpoint.sealed import FORMAT_VERSION, seal, unseal
from torchrelay.config import RunSpec
from torchrelay.errors import ConfigError, CorruptionError
from torchrelay.store.memory import MemoryStore

_REF = ManifestRef(7, 2)
_HEAD = Manifest(
    run_id=RUN,
    ref=_REF,
    world_size=1,
    begin=ManifestRef(4, 1),
    tensors={"model/w": TensorMeta("float32", (2, 3)), "scalar": TensorMeta("bfloat16", ())},
    state={"model": {"w": {"$tensor": "model/w"}}, "lr": 0.1},
    data={"consumed": 112},
    trace=((5, 0.5), (6, None)),
    info={"host": "a"},
)
_MANIFEST = Manifest.from_body({**_HEAD.head(), "records": [[0, "ab" * 32, 900]]}, where="manifest")
_RECORD = ShardRecord(
    run_id=RUN,
    ref=_REF,
    rank=0,
    world_size=1,
    packs=(PackInfo("cd" * 16, 130), PackInfo("ce" * 16, 7, ManifestRef(2, 1))),
    boxes=(
        Box("model/w", (0, 0), (2, 3), (Chunk(0, 24, 0, 96, "ef" * 16),)),
        Box("scalar", (), (), (Chunk(0, 2, 0, 120, "01" * 16),)),
    ),
    local={"rng": {"$bytes": "AAEC"}},
    cover=2**100 + 7,
    head=_HEAD.head(),
    fragment={"tensors": {"x": ["int8", [4]]}, "items": {"model": [[0, {"$tensor": "x"}]]}},
)
_GENERATION = Generation(
    run_id=RUN, number=3, begin=_REF, lineage=((1, 4), (2, 7)), nonce="5a" * 8, info={"host": "a", "holder": None}
)

_PARSERS: dict[str, Callable[[bytes], object]] = {
    "manifest": lambda data: Manifest.from_bytes(data, where="it"),
    "record": lambda data: ShardRecord.from_bytes(data, where="it"),
    "generation": lambda data: Generation.from_bytes(data, where="it"),
}
_DOCUMENTS = {
    "manifest": _MANIFEST.to_bytes(),
    "record": _RECORD.to_bytes(),
    "generation": _GENERATION.to_bytes(),
}
_KINDS = sorted(_DOCUMENTS)

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
_NATURAL = st.integers(0, 2**62)
_REFS = st.builds(ManifestRef, _NATURAL, _NATURAL)
_METAS = st.builds(TensorMeta, st.sampled_from(sorted(DTYPES)), st.lists(_NATURAL, max_size=4).map(tuple))
_MANIFESTS = st.builds(
    Manifest,
    run_id=st.text(),
    ref=_REFS,
    world_size=_NATURAL,
    begin=st.none() | _REFS,
    tensors=st.dictionaries(st.text(), _METAS, max_size=4),
    state=_JSON,
    data=st.dictionaries(st.text(), _JSON, max_size=3),
    trace=st.lists(st.tuples(_NATURAL, st.none() | st.floats(allow_nan=False, allow_infinity=False)), max_size=4).map(
        tuple
    ),
    info=st.dictionaries(st.text(), _JSON, max_size=3),
    records=st.lists(st.builds(RecordRef, _NATURAL, st.text(), _NATURAL), max_size=4).map(tuple),
)


def _sealed(kind: str, version: int, line: bytes) -> bytes:
    """Seal a body by the rule on the page of the format, not by the code under test."""
    name = f"torchrelay/{kind}/{version}"
    digest = hashlib.sha256(name.encode() + b"\n" + line).hexdigest()
    return json.dumps({"format": name, "sha256": digest}).encode() + b"\n" + line + b"\n"


@given(st.dictionaries(st.text(), _JSON))
def test_a_sealed_body_comes_back_equal(body: dict[str, Any]) -> None:
    """Whatever plain JSON says, names and texts of any script included; two lines, whatever is in them."""
    data = seal("run", body)
    assert unseal("run", data, where="it") == body
    assert unseal("run", memoryview(bytearray(data)), where="it") == body
    assert data.count(b"\n") == 2
    assert _sealed("run", FORMAT_VERSION, data.split(b"\n")[1]).split(b"\n")[1:] == data.split(b"\n")[1:]


@given(_MANIFESTS)
def test_a_manifest_comes_back_equal_and_has_one_spelling(manifest: Manifest) -> None:
    """Equal values, and equal bytes: whoever finishes a commit writes the same object."""
    data = manifest.to_bytes()
    again = Manifest.from_bytes(data, where="it")
    assert again == manifest
    assert again.to_bytes() == data


def test_a_record_and_a_generation_come_back_equal() -> None:
    """With everything in them that can be there."""
    assert ShardRecord.from_bytes(_RECORD.to_bytes(), where="it").to_bytes() == _RECORD.to_bytes()
    assert Generation.from_bytes(_GENERATION.to_bytes(), where="it") == _GENERATION


@pytest.mark.parametrize("kind", _KINDS)
def test_every_flipped_bit_is_damage(kind: str) -> None:
    """Each bit of each byte, those of the version number included: damage, never a newer version and never another value."""
    good = _DOCUMENTS[kind]
    for place in range(len(good) - 1):  # the last line feed says nothing
        for bit in range(8):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            with pytest.raises(CorruptionError):
                _PARSERS[kind](bytes(bad))


@pytest.mark.parametrize("kind", _KINDS)
def test_every_shorter_or_longer_document_is_damage(kind: str) -> None:
    """Each length; only the line feed at the very end may be missing."""
    good = _DOCUMENTS[kind]
    for length in range(len(good) - 1):
        with pytest.raises(CorruptionError):
            _PARSERS[kind](good[:length])
    assert _PARSERS[kind](good[:-1]) == _PARSERS[kind](good)
    for more in (b"\0", b"\n", b" ", good):
        with pytest.raises(CorruptionError):
            _PARSERS[kind](good + more)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_damage(data: bytes) -> None:
    """Whatever lies under the name: an error that readers handle, not one that stops them."""
    for parse in _PARSERS.values():
        with pytest.raises(CorruptionError):
            parse(data)


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b"7", b"\xff", b'{"a":1}{"a":1}'])
def test_an_intact_seal_around_no_object_is_damage(line: bytes) -> None:
    """The digest is right, the body is not a JSON object."""
    with pytest.raises(CorruptionError):
        unseal("run", _sealed("run", FORMAT_VERSION, line), where="it")


@pytest.mark.parametrize("kind", _KINDS)
def test_a_document_of_another_kind_is_damage(kind: str) -> None:
    """An object under the wrong key is not taken for what the key promises."""
    for other in _KINDS:
        if other != kind:
            with pytest.raises(CorruptionError, match=f"expected a {kind}"):
                _PARSERS[kind](_DOCUMENTS[other])


def _resealed_detail(detail: Any) -> bytes:
    """Put another detail into the record, with a summary that names it rightly."""
    line = json.dumps(detail).encode()
    summary = json.loads(_DOCUMENTS["record"].split(b"\n")[1])
    return seal("record", {**summary, "detail": [hashlib.sha256(line).hexdigest(), len(line)]}) + line + b"\n"


def test_a_malformed_detail_is_damage_or_means_something() -> None:
    """The same for the second part of a record."""
    refused = 0
    detail = json.loads(_DOCUMENTS["record"].split(b"\n")[2])
    assert ShardRecord.from_bytes(_resealed_detail(detail), where="it").boxes == _RECORD.boxes
    for spoilt in _spoilt(detail):
        try:
            check_cover(_HEAD.tensors, [ShardRecord.from_bytes(_resealed_detail(spoilt), where="it")])
        except CorruptionError:
            refused += 1
    assert refused > 50


def _spoilt(body: Any) -> Iterator[Any]:
    """Yield the body with each of its nodes, in turn, taken away or replaced by something of another kind."""
    for key in list(body) if isinstance(body, dict) else range(len(body)):
        for other in (None, True, -1, 2.5, "x", [], [1], {}, {"x": 1}, 10**30):
            changed = copy.deepcopy(body)
            changed[key] = other
            yield changed
        shorter = copy.deepcopy(body)
        del shorter[key]
        yield shorter
        if isinstance(body[key], dict | list):
            for inner in _spoilt(body[key]):
                changed = copy.deepcopy(body)
                changed[key] = inner
                yield changed


@pytest.mark.parametrize("kind", _KINDS)
def test_a_malformed_body_is_damage_or_means_something(kind: str) -> None:
    """Each field missing or of another type, under a good seal: reading it and using it raises CorruptionError or nothing."""
    refused = 0
    body = json.loads(_DOCUMENTS[kind].split(b"\n")[1])
    for spoilt in _spoilt(body):
        try:
            document = _PARSERS[kind](seal(kind, spoilt) + b"\n".join(_DOCUMENTS[kind].split(b"\n")[2:]))
            if isinstance(document, ShardRecord):
                check_cover(_HEAD.tensors, [document])
            elif isinstance(document, Generation):
                chain(document, [_REF])
        except CorruptionError:
            refused += 1
    assert refused > 50


def test_parts_of_negative_size_are_damage() -> None:
    """Two negative extents have the volume of two positive ones, and would pass for the whole tensor."""
    box = Box("model/w", (2, 3), (-2, -3), (Chunk(0, 24, 0, 96, "ef" * 16),))
    data = replace(_RECORD, boxes=(box,)).to_bytes()
    with pytest.raises(CorruptionError, match="malformed"):
        ShardRecord.from_bytes(data, where="it")


@pytest.mark.parametrize("kind", _KINDS)
def test_a_newer_version_is_named_and_told_from_damage(kind: str) -> None:
    """The next version's body may be anything; the hint says how to read it. Damaged, it is damage like any other."""
    newer = _sealed(kind, FORMAT_VERSION + 1, b'["something", "new"]')
    with pytest.raises(ConfigError, match=f"format version {FORMAT_VERSION + 1}; .* up to {FORMAT_VERSION}") as caught:
        _PARSERS[kind](newer)
    assert caught.value.hint == "pip install --upgrade torchrelay"
    with pytest.raises(CorruptionError):
        _PARSERS[kind](newer.replace(b"new", b"old"))


def test_newer_documents_stop_whoever_meets_them() -> None:
    """A newer program's lease, and records of a save it had not committed: nobody steps over them, and nothing is written."""
    store = MemoryStore()
    claim = new_run(store)
    save(store, ManifestRef(10, 1))
    Lease(store, claim, lease_s=1.0).end({"kind": "killed"})
    write(store, ManifestRef(20, 1))
    for key in (lease_key(RUN, 1), record_key(RUN, ManifestRef(20, 1), 0, 2)):
        good = bytes(store.get(key))
        kind = "lease" if "leases" in key else "record"
        store.put(key, _sealed(kind, FORMAT_VERSION + 1, b"{}"))
        before = store.list("").objects
        with pytest.raises(ConfigError, match="format version"):
            begin(store)
        assert store.list("").objects == before
        store.put(key, good)
    assert begin(store).begin == ManifestRef(20, 1)
    assert not store.list(damage_prefix(RUN)).objects


def test_a_record_that_does_not_belong_is_not_committed() -> None:
    """Under the right key, but of another run, step, generation or number of ranks."""
    for other in ({"run_id": "s"}, {"ref": ManifestRef(21, 1)}, {"ref": ManifestRef(20, 2)}, {"world_size": 3}):
        store = MemoryStore()
        new_run(store)
        write(store, ManifestRef(20, 1))
        key = record_key(RUN, ManifestRef(20, 1), 1, 2)
        record = ShardRecord.from_bytes(store.get(key), where=key)
        store.put(key, replace(record, **other).to_bytes())
        with pytest.raises(CorruptionError, match="belongs to another checkpoint"):
            commit_manifest(store, RUN, ManifestRef(20, 1))
        assert not store.list(manifests_prefix(RUN)).objects


_NO_KEYS = ["", ".", "..", "../x", "x/../y", "/x", "a b", "a\nb", "a\0", "é", "a%2f", "a" * 101, "a" * 300]


@pytest.mark.parametrize("name", [*_NO_KEYS, "a/b", "a..b", "-a", ".a", "A", "a" * 81])
def test_odd_run_names_are_refused_by_the_spec(name: str) -> None:
    """In words that say what a name may be, and without repeating a very long one."""
    with pytest.raises(ValueError, match="not usable as a name: use lower case letters") as caught:
        RunSpec(run_id=name)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", _NO_KEYS)
def test_odd_run_names_never_become_keys(name: str) -> None:
    """Should one get past the spec: the store refuses the key, and nothing is written."""
    store = MemoryStore()
    with pytest.raises(ValueError, match="not a portable object key"):
        start_generation(store, name, info={}, lease_s=1.0)
    assert not store.list("").objects


@given(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,79}", fullmatch=True).filter(lambda name: ".." not in name))
def test_every_allowed_run_name_is_found_again(name: str) -> None:
    """Whatever a spec lets pass is a key on every store, and is read back from it."""
    store = MemoryStore()
    open_run(store, RunSpec(run_id=name), provenance={})
    assert parse_run_key(run_key(name)) == name
    assert read_run(store, name)["spec"]["run_id"] == name
    assert start_generation(store, name, info={}, lease_s=1.0).generation == 1
    newest = read_history(store, name).newest
    assert newest is not None
    assert newest.key == generation_key(name, 1)


@given(_REFS, st.integers(0, 9999), st.integers(1, 9999), st.sampled_from(["", "00ff", "5a" * 8]))
def test_keys_say_what_they_name(ref: ManifestRef, rank: int, world: int, token: str) -> None:
    """Each key is read back as what it was made of, and by no other reader."""
    keys = [ref.key(RUN), generation_key(RUN, ref.generation, token), record_key(RUN, ref, rank, world)]
    readers: list[Callable[[str], object]] = [parse_manifest_key, parse_generation_key, parse_record_key]
    found = [[reader(key) for reader in readers] for key in keys]
    assert found[0] == [ref, None, None]
    assert found[1] == [None, GenerationKey(ref.generation, token), None]
    assert found[2] == [None, None, (ref, rank, world)]
