"""What the network and the server may do to the S3 client: survived, or named; and never wrong bytes."""

from __future__ import annotations

import os
import random
import secrets
import threading
from collections.abc import Iterator
from typing import get_args

import pytest

from tests.waiting import wait_until
from torchrelay.errors import RetryableError, StoreAccessError, StoreUnavailableError
from torchrelay.store import RetryPolicy, open_store
from torchrelay.store.base import ObjectStore
from torchrelay.testing.chaos_proxy import ChaosProxy, Fault
from torchrelay.testing.servers import SeaweedServer

_BODY = random.Random(2).randbytes(3 * 2**20)
_FAULTS: list[Fault] = [
    fault for fault in get_args(Fault) if fault not in ("none", "stall-up", "stall-down", "flip-down")
]


@pytest.fixture
def proxy(seaweed: SeaweedServer) -> Iterator[ChaosProxy]:
    """A proxy before the server."""
    with ChaosProxy(seaweed.endpoint) as running:
        yield running


@pytest.fixture
def store(seaweed: SeaweedServer, proxy: ChaosProxy) -> ObjectStore:
    """The server through the proxy, with retries."""
    policy = RetryPolicy(first_s=0.01, longest_s=0.1, base_s=20)
    return seaweed.open(f"faults/{secrets.token_hex(6)}", endpoint=proxy.endpoint, policy=policy)


@pytest.mark.parametrize("fault", _FAULTS)
def test_put_survives(store: ObjectStore, proxy: ChaosProxy, fault: Fault) -> None:
    """Whatever happens to two PUTs in a row, the third is whole; a bit flipped on the way up is refused by the server's checksum."""
    proxy.add("PUT", fault, times=2)
    store.put("k", [_BODY[:100], _BODY[100:]])
    assert bytes(store.get("k")) == _BODY
    assert proxy.served[0] == ("PUT", fault)


@pytest.mark.parametrize("fault", _FAULTS)
def test_get_survives(store: ObjectStore, proxy: ChaosProxy, fault: Fault) -> None:
    """Whatever happens to two GETs in a row, the bytes are right."""
    store.put("k", _BODY)
    proxy.add("GET", fault, times=2)
    target = bytearray(2**20)
    store.get("k", offset=77, into=memoryview(target))
    assert target == _BODY[77 : 77 + 2**20]


@pytest.mark.parametrize("fault", _FAULTS)
def test_create_is_never_ambiguous(store: ObjectStore, proxy: ChaosProxy, fault: Fault) -> None:
    """A create whose reply was lost is ours all the same; what somebody else wrote is never taken for ours."""
    body = secrets.token_bytes(200)
    proxy.add("PUT", fault, times=1)
    assert store.create("k", body).ours
    assert bytes(store.get("k")) == body
    proxy.add("PUT", fault, times=1)
    other = store.create("k", secrets.token_bytes(200))
    assert not other.ours
    assert other.data == body


@pytest.mark.parametrize("fault", _FAULTS)
def test_list_and_delete_survive(store: ObjectStore, proxy: ChaosProxy, fault: Fault) -> None:
    """Listing and batch deletion are tried again too (a batch's body carries an MD5, which SeaweedFS does not check)."""
    for key in ("a", "b", "c"):
        store.put(key, b"x")
    proxy.add("GET", fault)
    assert [item.key for item in store.list("").objects] == ["a", "b", "c"]
    proxy.add("POST", fault if fault != "flip-up" else "none")
    store.delete(["a", "b"])
    assert [item.key for item in store.list("").objects] == ["c"]


def test_a_bit_flipped_on_the_way_down_is_for_the_callers_hash(store: ObjectStore, proxy: ChaosProxy) -> None:
    """No server checks what arrives: that is why every chunk carries a hash of its own."""
    store.put("k", _BODY)
    proxy.add("GET", "flip-down")
    assert bytes(store.get("k")) != _BODY
    assert bytes(store.get("k")) == _BODY


@pytest.mark.parametrize("fault", ["stall-up", "stall-down"])
def test_a_stalled_transfer_ends_with_an_error(seaweed: SeaweedServer, proxy: ChaosProxy, fault: Fault) -> None:
    """A peer that stops in the middle does not hold a call for ever."""
    environ = {**seaweed.environ("stall"), "TORCHRELAY_S3_ENDPOINT": proxy.endpoint, "TORCHRELAY_S3_TIMEOUT_S": "0.5"}
    store = open_store("", environ=environ, policy=RetryPolicy(first_s=0.01, longest_s=0.1, base_s=20))
    big = _BODY * 8  # more than the sockets' buffers hold
    proxy.add("PUT" if fault == "stall-up" else "GET", fault)
    store.put("k", big)
    assert bytes(store.get("k")) == big


def test_a_store_that_stays_away_is_named_with_a_hint(seaweed: SeaweedServer, proxy: ChaosProxy) -> None:
    """When the deadline has passed the last cause is raised; it says what to do, and holds no secret."""
    store = seaweed.open("away", endpoint=proxy.endpoint, policy=RetryPolicy(first_s=0.01, longest_s=0.05, base_s=0.3))
    proxy.add("*", "refuse", times=10_000)
    with pytest.raises(StoreUnavailableError, match="did not answer") as caught:
        store.put("k", b"x")
    assert "torchrelay up" in str(caught.value)
    assert seaweed.secret_key not in repr(caught.value) + str(caught.value) + repr(store) + store.url


def test_wrong_credentials_and_missing_bucket_say_what_to_do(seaweed: SeaweedServer) -> None:
    """Refusals are not tried again, and name the setting to look at."""
    environ = seaweed.environ()
    wrong = open_store("", environ={**environ, "TORCHRELAY_SECRET_KEY": "not-the-secret"})
    with pytest.raises(StoreAccessError, match="TORCHRELAY_ACCESS_KEY"):
        wrong.put("k", b"x")
    with pytest.raises(StoreAccessError, match="TORCHRELAY_ACCESS_KEY"):
        wrong.list("")
    missing = open_store("s3://no-such-bucket/p", environ=environ)
    for call in (lambda: missing.put("k", b"x"), lambda: missing.get("k"), lambda: missing.list("")):
        with pytest.raises(StoreAccessError, match="--create-bucket"):
            call()


def test_a_store_opened_before_fork_is_refused_after_it(seaweed: SeaweedServer) -> None:
    """A shared connection would give one process the other's bytes."""
    store = seaweed.open("fork")
    store.put("k", b"x")
    child = os.fork()
    if child == 0:
        try:
            store.get("k")
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(store.get("k")) == b"x"


def test_a_put_rides_out_a_crash_of_the_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    """SIGKILL of the server in the middle of many PUTs, and a restart: every PUT that returned is there."""
    with SeaweedServer(tmp_path_factory.mktemp("crash")) as server:
        store = server.open("crash", policy=RetryPolicy(first_s=0.05, longest_s=0.5, base_s=60))
        done: list[str] = []

        def write() -> None:
            for index in range(60):
                store.put(f"k/{index:03d}", _BODY[: 50_000 + index])
                done.append(f"k/{index:03d}")

        writer = threading.Thread(target=write)
        writer.start()
        wait_until(lambda: len(done) > 10, what="ten writes")
        server.kill()
        server.start()
        writer.join(60)
        assert len(done) == 60
        for index, key in enumerate(done):
            assert bytes(store.get(key)) == _BODY[: 50_000 + index]


def test_a_skewed_clock_is_corrected_by_the_servers(seaweed: SeaweedServer) -> None:
    """A host whose clock is hours off signs with the server's time after the first refusal."""
    import datetime

    store = seaweed.open(f"skew/{secrets.token_hex(4)}")
    inner = store.inner  # type: ignore[attr-defined]
    inner._skew = datetime.timedelta(hours=3)
    store.put("k", b"x")
    assert abs(inner._skew.total_seconds()) < 60
    assert bytes(store.get("k")) == b"x"


def test_retryable_errors_are_a_class_of_their_own() -> None:
    """What may be tried again can be told by type."""
    assert issubclass(StoreUnavailableError, RetryableError)
    assert not issubclass(StoreAccessError, RetryableError)
