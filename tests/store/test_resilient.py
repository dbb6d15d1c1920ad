"""When calls are tried again, how long, and when not."""

from __future__ import annotations

import random

import pytest

from torchrelay.errors import (
    ConfigError,
    CorruptionError,
    NotFoundError,
    StorageFullError,
    StoreAccessError,
    StoreUnavailableError,
)
from torchrelay.store import open_store
from torchrelay.store.memory import MemoryStore
from torchrelay.store.resilient import ResilientStore, RetryPolicy
from torchrelay.testing.clock import FakeClock
from torchrelay.testing.faulty_store import FaultyStore, SimulatedCrash


def _resilient(inner: FaultyStore, clock: FakeClock, **policy: float) -> ResilientStore:
    return ResilientStore(
        inner, RetryPolicy(**policy), monotonic=clock.monotonic, sleep=clock.sleep, rng=random.Random(0)
    )


@pytest.mark.parametrize("effect", ["before", "after"])
def test_every_verb_is_tried_again(effect: str) -> None:
    """A call that failed once succeeds, whether or not the first attempt took effect."""
    for number in range(1, 7):
        inner = FaultyStore(MemoryStore(), fail_at=number, effect=effect)  # type: ignore[arg-type]
        store = _resilient(inner, FakeClock())
        store.put("a", b"1")
        assert store.create("b", b"nonce").ours
        assert bytes(store.get("a")) == b"1"
        assert [item.key for item in store.list("").objects] == ["a", "b"]
        store.delete(["a"])
        assert store.probe().create
        assert inner.calls == 7


def test_waits_grow_with_full_jitter_and_stay_below_the_cap() -> None:
    """Each wait is drawn from zero to a bound that doubles up to the cap."""
    waits: list[float] = []
    clock = FakeClock()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock.sleep(seconds)

    inner = FaultyStore(MemoryStore(), fail_at=1, persistent=True)
    store = ResilientStore(
        inner,
        RetryPolicy(first_s=1.0, longest_s=8.0, base_s=200.0),
        monotonic=clock.monotonic,
        sleep=sleep,
        rng=random.Random(0),
    )
    with pytest.raises(StoreUnavailableError):
        store.put("a", b"x")
    bounds = [1.0, 2.0, 4.0] + [8.0] * len(waits)
    assert all(0 <= wait <= bound for wait, bound in zip(waits, bounds, strict=False))
    assert max(waits) > 4.0


def test_the_deadline_grows_with_the_bytes() -> None:
    """A large body may take longer than a small one."""
    spent = []
    for size in (1, 50_000_000):
        clock = FakeClock(0.0)
        store = _resilient(FaultyStore(MemoryStore(), fail_at=1, persistent=True), clock, base_s=10.0, bytes_per_s=1e6)
        with pytest.raises(StoreUnavailableError):
            store.put("a", bytes(size))
        spent.append(clock.now_s)
    assert spent[0] <= 10.0
    assert 30.0 < spent[1] <= 60.0


def test_the_servers_wish_is_respected_up_to_the_cap() -> None:
    """Retry-After decides the wait, but not beyond the longest."""
    clock = FakeClock(0.0)
    slow = FaultyStore(MemoryStore(), fail_at=1, error=lambda: StoreUnavailableError("slow down", retry_after_s=3.0))
    _resilient(slow, clock).put("a", b"x")
    assert clock.now_s == 3.0
    very_slow = FaultyStore(
        MemoryStore(), fail_at=1, error=lambda: StoreUnavailableError("slow down", retry_after_s=120.0)
    )
    _resilient(very_slow, clock, longest_s=5.0).put("a", b"x")
    assert clock.now_s == 8.0


@pytest.mark.parametrize(
    "error", [StoreAccessError("no"), NotFoundError("no"), CorruptionError("no"), SimulatedCrash()]
)
def test_what_cannot_get_better_is_not_tried_again(error: BaseException) -> None:
    """Refusals, damage and crashes are the caller's."""
    inner = FaultyStore(MemoryStore(), fail_at=1, error=lambda: error)
    with pytest.raises(type(error)):
        _resilient(inner, FakeClock()).put("a", b"x")
    assert inner.calls == 1


def test_a_full_store_is_tried_again_and_then_named() -> None:
    """Space may come back; if not, the error says what is wrong."""
    inner = FaultyStore(MemoryStore(), fail_at=1, persistent=True, error=lambda: StorageFullError("full"))
    with pytest.raises(StorageFullError):
        _resilient(inner, FakeClock()).put("a", b"x")
    assert inner.calls > 1


@pytest.mark.parametrize(
    ("url", "environ", "message"),
    [
        ("", {}, "no store is given"),
        ("ftp://x", {}, "cannot open store"),
        ("file://relative", {}, "cannot open store"),
        ("s3://bucket/p", {}, "no credentials"),
        (
            "s3://key:secret@bucket/p",
            {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
            "must not contain credentials",
        ),
        ("s3://bucket/p?endpoint=nowhere", {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, "endpoint"),
    ],
)
def test_a_bad_store_setting_is_named_with_a_hint(url: str, environ: dict[str, str], message: str) -> None:
    """Every refusal says what to do next, and never repeats a secret."""
    with pytest.raises(ConfigError, match=message) as caught:
        open_store(url, environ=environ)
    assert caught.value.hint
    assert "secret@" not in str(caught.value)


def test_the_memory_store_is_shared_by_name() -> None:
    """Opening a name twice gives the same objects."""
    open_store("memory://shared").put("k", b"x")
    assert bytes(open_store("memory://shared").get("k")) == b"x"
    with pytest.raises(NotFoundError):
        open_store("memory://other").get("k")
