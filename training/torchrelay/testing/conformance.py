"""The promises of ``ObjectStore`` as tests: subclass ``StoreConformance`` and give it a ``store`` fixture.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self) -> ObjectStore:
            return MyStore(...)

The store should be empty, or a prefix of its own. What a store cannot do (``create``) is skipped by what ``probe`` measured, not by a list.
"""

from __future__ import annotations

import mmap
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import pytest

from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.base import ObjectStore, Payload

__all__ = ["StoreConformance"]

_BODY = random.Random(1).randbytes(100_000)


class StoreConformance:
    """Each test is one promise of one verb."""

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_000, 9 * 2**20])
    def test_put_then_get_gives_the_same_bytes(self, store: ObjectStore, size: int) -> None:
        """What was put is what is got, whole."""
        body = random.Random(size).randbytes(size)
        store.put("a/object", body)
        assert bytes(store.get("a/object")) == body

    @pytest.mark.parametrize("shape", ["bytes", "bytearray", "view", "mmap", "sequence", "words"])
    def test_put_takes_any_buffer(self, store: ObjectStore, shape: str) -> None:
        """Any contiguous buffer, and a sequence of them as their concatenation."""
        with mmap.mmap(-1, len(_BODY)) as area:
            area[:] = _BODY
            payloads: dict[str, Payload] = {
                "bytes": _BODY,
                "bytearray": bytearray(_BODY),
                "view": memoryview(bytearray(_BODY)),
                "mmap": bytes(area) if shape != "mmap" else memoryview(area).toreadonly(),
                "sequence": [_BODY[:10], b"", bytearray(_BODY[10:50_000]), memoryview(_BODY)[50_000:]],
                "words": memoryview(_BODY).cast("I"),
            }
            store.put("buffer", payloads[shape])
            payloads.clear()
        assert bytes(store.get("buffer")) == _BODY

    def test_put_replaces(self, store: ObjectStore) -> None:
        """The newest put wins, also when it is shorter."""
        store.put("k", b"a long first body")
        store.put("k", b"short")
        assert bytes(store.get("k")) == b"short"

    def test_get_ranges(self, store: ObjectStore) -> None:
        """Any range inside the object, into a given buffer or a new one."""
        store.put("k", _BODY)
        assert bytes(store.get("k", offset=7, length=100)) == _BODY[7:107]
        assert bytes(store.get("k", offset=99_990)) == _BODY[99_990:]
        assert bytes(store.get("k", length=0)) == b""
        target = bytearray(3000)
        view = store.get("k", offset=5000, into=memoryview(target))
        assert len(view) == 3000
        assert target == _BODY[5000:8000]
        store.get("k", offset=1, length=10, into=memoryview(target))
        assert target[:10] == _BODY[1:11]
        assert target[10:] == _BODY[5010:8000]

    @pytest.mark.parametrize(("offset", "length"), [(0, 100_001), (99_999, 2), (100_000, 1), (200_000, 10)])
    def test_a_short_read_is_an_error(self, store: ObjectStore, offset: int, length: int) -> None:
        """An object shorter than asked for is never silently returned."""
        store.put("k", _BODY)
        with pytest.raises(CorruptionError):
            store.get("k", offset=offset, length=length)
        with pytest.raises(CorruptionError):
            store.get("k", offset=offset, into=memoryview(bytearray(length)))

    def test_a_missing_object_is_not_found(self, store: ObjectStore) -> None:
        """Reading what is not there."""
        with pytest.raises(NotFoundError):
            store.get("missing/one")
        with pytest.raises(NotFoundError):
            store.get("missing/two", offset=5, length=10)

    def test_list_is_ordered_and_complete(self, store: ObjectStore) -> None:
        """Byte order of keys, exact sizes, the server's clock."""
        keys = ["b", "a-1", "a/2", "a/1/z", "a.x", "a_", "a=1", "A"]
        for index, key in enumerate(keys):
            store.put(key, bytes(index))
        listing = store.list("")
        assert [item.key for item in listing.objects] == sorted(keys)
        assert {item.key: item.size_bytes for item in listing.objects} == {key: index for index, key in enumerate(keys)}
        assert all(abs(item.modified_s - listing.server_time_s) < 3600 for item in listing.objects)
        assert abs(listing.server_time_s - time.time()) < 3600

    def test_list_by_prefix_after_and_limit(self, store: ObjectStore) -> None:
        """A prefix is a string, not a folder; ``after`` is exclusive and need not exist."""
        for key in ("run/a/1", "run/a/2", "run/a/3", "run/ab", "run/b"):
            store.put(key, b"x")

        def keys(prefix: str, after: str = "", limit: int | None = None) -> list[str]:
            return [item.key for item in store.list(prefix, after=after, limit=limit).objects]

        assert keys("run/a") == ["run/a/1", "run/a/2", "run/a/3", "run/ab"]
        assert keys("run/a/") == ["run/a/1", "run/a/2", "run/a/3"]
        assert keys("run/a/", "run/a/1") == ["run/a/2", "run/a/3"]
        assert keys("run/a/", "run/a/1x") == ["run/a/2", "run/a/3"]
        assert keys("run/a/", limit=2) == ["run/a/1", "run/a/2"]
        assert keys("run/a/", "run/a/2", 1) == ["run/a/3"]
        assert keys("none/") == []
        assert keys("run/a/", "run/a/3") == []

    def test_list_joins_pages(self, store: ObjectStore) -> None:
        """More objects than a server gives at once."""
        keys = [f"many/{index:05d}" for index in range(1100)]
        with ThreadPoolExecutor(8) as executor:
            list(executor.map(store.put, keys, repeat(b"x")))
        assert [item.key for item in store.list("many/").objects] == keys
        assert [item.key for item in store.list("many/", after="many/00500").objects] == keys[501:]
        store.delete(keys)
        assert store.list("many/").objects == ()

    def test_an_object_is_listed_once_put_returns(self, store: ObjectStore) -> None:
        """No waiting between a write and the listing that must show it."""
        for index in range(30):
            store.put(f"seen/{index:02d}", b"x")
            assert len(store.list("seen/").objects) == index + 1

    def test_delete(self, store: ObjectStore) -> None:
        """Deleted objects are gone, missing ones are fine, others stay."""
        for key in ("d/1", "d/2", "d/3"):
            store.put(key, b"x")
        store.delete(["d/1", "d/3", "d/never"])
        store.delete([])
        assert [item.key for item in store.list("d/").objects] == ["d/2"]
        with pytest.raises(NotFoundError):
            store.get("d/1")

    @pytest.mark.parametrize(
        "key", ["", "/a", "a/", "a//b", "./a", "a/../b", "a b", "ä", "a\n", "x" * 101, "a~b", "a\\b"]
    )
    def test_odd_keys_are_refused(self, store: ObjectStore, key: str) -> None:
        """Keys that some store would alter or refuse are refused by all."""
        for call in (lambda: store.put(key, b"x"), lambda: store.create(key, b"x"), lambda: store.get(key)):
            with pytest.raises(ValueError, match="not a portable object key"):
                call()

    def test_create_answers_what_is_there(self, store: ObjectStore) -> None:
        """The first wins; the second is told what it found; our own bytes again are ours."""
        if not store.probe().create:
            pytest.skip("this store ignores conditional writes, as its probe found")
        first, second = store.create("c/1", b"first nonce"), store.create("c/1", b"second nonce")
        assert (first.ours, first.data) == (True, b"first nonce")
        assert (second.ours, second.data) == (False, b"first nonce")
        assert store.create("c/1", b"first nonce").ours
        assert bytes(store.get("c/1")) == b"first nonce"

    def test_of_sixteen_creators_one_wins(self, store: ObjectStore) -> None:
        """However they race, exactly one is told that the object is its own, and the object agrees."""
        if not store.probe().create:
            pytest.skip("this store ignores conditional writes, as its probe found")
        with ThreadPoolExecutor(16) as executor:
            for turn in range(4):
                bodies = [f"writer {writer} turn {turn}".encode() for writer in range(16)]
                answers = list(executor.map(store.create, repeat(f"race/{turn}"), bodies))
                winners = [body for body, answer in zip(bodies, answers, strict=True) if answer.ours]
                assert winners == [bytes(store.get(f"race/{turn}"))]
                assert {answer.data for answer in answers} == set(winners)

    def test_probe_leaves_nothing(self, store: ObjectStore) -> None:
        """Measuring does not litter."""
        store.put("keep", b"x")
        store.probe()
        assert [item.key for item in store.list("").objects] == ["keep"]

    def test_many_threads(self, store: ObjectStore) -> None:
        """Threads share a store without mixing up each other's bytes."""
        bodies = {f"t/{index:02d}": random.Random(index).randbytes(2**18 + index) for index in range(24)}
        with ThreadPoolExecutor(12) as executor:
            list(executor.map(lambda pair: store.put(*pair), bodies.items()))
            got = dict(zip(bodies, executor.map(lambda key: bytes(store.get(key)), bodies), strict=True))
        assert got == bodies
