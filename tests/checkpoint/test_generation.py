"""Starting a generation: one winner, patience with the living, none with the dead; on stores with and without conditional writes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from tests.checkpointing import RUN, SPEC, begin, contents, expected, latest, new_run, save, write
from torchrelay.checkpoint.commit import commit_manifest
from torchrelay.checkpoint.generation import (
    GenerationClaim,
    Lease,
    list_runs,
    open_run,
    read_lease,
    read_run,
    start_generation,
)
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.host import ProcessIdentity, this_process
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.sealed import seal
from torchrelay.config import RunSpec
from torchrelay.errors import ConflictError, FencedError, NotFoundError, RunBusyError, RunMismatchError
from torchrelay.store.base import ObjectStore
from torchrelay.store.files import FileStore
from torchrelay.store.memory import MemoryStore
from torchrelay.testing.clock import FakeClock
from torchrelay.testing.servers import JuiceGateway, SeaweedServer


@pytest.fixture(params=["memory", "files", "seaweed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Each kind of store that has conditional writes."""
    kind: Literal["memory", "files", "seaweed"] = request.param
    if kind == "memory":
        return MemoryStore()
    if kind == "files":
        return FileStore(tmp_path / "store")
    server: SeaweedServer = request.getfixturevalue("seaweed")
    return server.open(f"generation-{abs(hash(tmp_path)):x}")


def test_of_many_starts_at_once_exactly_one_wins(store: ObjectStore) -> None:
    """Twelve threads, one number; the others are told that the run is busy."""
    open_run(store, SPEC, provenance={})

    def start(_: int) -> GenerationClaim | RunBusyError:
        try:
            return begin(store)
        except RunBusyError as error:
            return error

    with ThreadPoolExecutor(12) as executor:
        results = list(executor.map(start, range(12)))
    claims = [result for result in results if isinstance(result, GenerationClaim)]
    # A late one may begin after the first has won, wait for its lapsed lease, and be the second; never two of one number.
    numbers = [claim.generation for claim in claims]
    assert len(set(numbers)) == len(numbers) >= 1
    newest = read_history(store, RUN).newest
    assert newest is not None
    assert newest.number == max(numbers)


class _Living:
    """A clock during whose sleep the holder renews its lease."""

    def __init__(self, lease: Lease) -> None:
        self.clock, self.lease = FakeClock(), lease
        self.monotonic = self.clock.monotonic

    def sleep(self, seconds: float) -> None:
        """Let time pass; the other side works."""
        self.clock.sleep(seconds)
        self.lease.renew(step=1)


def test_a_living_generation_is_left_alone() -> None:
    """Its lease moves while one watches: the answer names host and process, and nothing is written."""
    store = MemoryStore()
    lease = Lease(store, new_run(store), lease_s=5.0)
    lease.renew(step=0)
    with pytest.raises(RunBusyError, match=f"pid {os.getpid()}") as caught:
        start_generation(store, RUN, info={}, lease_s=5.0, clock=_Living(lease))
    assert caught.value.hint
    assert read_history(store, RUN).next_number == 2


def test_a_lease_lapses_by_the_observers_clock_alone() -> None:
    """It must stand still for its whole term, the longer of the holder's and ours; the wall clock plays no part."""
    store = MemoryStore()
    Lease(store, new_run(store), lease_s=9.0).renew(step=0)
    clock = FakeClock()
    start_generation(store, RUN, info={}, lease_s=2.0, clock=clock)
    assert 9.0 < clock.now_s - 1000.0 < 10.5


def test_an_ended_generation_is_not_waited_for() -> None:
    """The holder said that it is done."""
    store = MemoryStore()
    Lease(store, new_run(store), lease_s=60.0).end({"kind": "completed"})
    clock = FakeClock()
    assert start_generation(store, RUN, info={}, lease_s=60.0, clock=clock).generation == 2
    assert clock.now_s == 1000.0


def test_a_dead_process_of_this_host_is_not_waited_for() -> None:
    """Its pid is gone, or belongs to another process now: known at once."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    identity = this_process(child.pid)
    assert not identity.is_gone()
    child.kill()
    child.wait()
    assert identity.is_gone()
    assert replace(this_process(), started=1).is_gone()
    for elsewhere in (replace(identity, host="other"), replace(identity, boot="x"), replace(identity, namespace="x")):
        assert not elsewhere.is_gone()
    store = MemoryStore()
    Lease(store, new_run(store), lease_s=60.0, holder=identity).renew(step=3)
    clock = FakeClock()
    assert start_generation(store, RUN, info={}, lease_s=60.0, clock=clock).generation == 2
    assert clock.now_s == 1000.0
    assert ProcessIdentity.from_dict({"pid": 3}) is None


def test_who_waits_can_be_called_off() -> None:
    """A stop while waiting for a lease ends the wait."""
    store = MemoryStore()
    Lease(store, new_run(store), lease_s=60.0).renew(step=0)
    with pytest.raises(ConflictError, match="stopped while waiting"):
        start_generation(store, RUN, info={}, lease_s=60.0, clock=FakeClock(), cancelled=lambda: True)


def test_the_superseded_one_finds_out(store: ObjectStore) -> None:
    """Renewing and committing are refused once there is a newer generation; what it wrote on the way does not count."""
    claim = new_run(store)
    save(store, ManifestRef(10, 1))
    lease = Lease(store, claim, lease_s=1.0)
    lease.end({"kind": "killed"})
    successor = begin(store)
    assert (successor.generation, successor.begin) == (2, ManifestRef(10, 1))
    with pytest.raises(FencedError, match="generation 2"):
        lease.renew(step=12)
    write(store, ManifestRef(20, 1))
    with pytest.raises(FencedError):
        commit_manifest(store, RUN, ManifestRef(20, 1))
    assert latest(store) == ManifestRef(10, 1)


def test_a_complete_but_uncommitted_save_of_the_dead_is_finished(store: ObjectStore) -> None:
    """All records were there: the successor commits it instead of training those steps again, and says so."""
    new_run(store)
    save(store, ManifestRef(10, 1))
    write(store, ManifestRef(20, 1))
    claim = begin(store)
    assert claim.begin == ManifestRef(20, 1)
    assert any("finished the commit of step 20" in notice for notice in claim.notices)
    assert contents(store, ManifestRef(20, 1)) == expected(ManifestRef(20, 1))


def test_a_run_is_created_once_and_compared_ever_after(store: ObjectStore) -> None:
    """The same spec goes on; another one is refused and told what differs."""
    open_run(store, SPEC, provenance={"host": "a"})
    open_run(store, SPEC, provenance={"host": "b"})
    assert read_run(store, RUN)["provenance"] == {"host": "a"}
    other = RunSpec(run_id=RUN, total_steps=7, seed=3)
    with pytest.raises(
        RunMismatchError, match=r"total_steps: the run has 1000, this spec has 7; seed: the run has 0"
    ) as caught:
        open_run(store, other, provenance={})
    assert "another run_id" in caught.value.hint


def test_runs_are_listed_by_name_whatever_they_hold(store: ObjectStore) -> None:
    """Names that are prefixes of each other are all found; half a run and other people's files are none."""
    names = ["a", "a-b", "a.b", "a0", "a_b", "b"]
    for name in names:
        open_run(store, RunSpec(run_id=name), provenance={})
        store.put(f"runs/{name}/zzz", b"")
    store.put("runs/half/generations/000001.json", b"")
    store.put("index/notes.txt", b"")
    assert list_runs(store) == sorted(names)
    with pytest.raises(NotFoundError, match="no run 'nope'"):
        read_run(store, "nope")


def test_a_lease_that_cannot_be_read_is_as_good_as_none() -> None:
    """Its owner will write it again."""
    store = MemoryStore()
    new_run(store)
    assert read_lease(store, RUN, 1) is None
    for content in (b"garbage", seal("lease", {"generation": 1}), seal("lease", {"generation": None})):
        store.put(f"runs/{RUN}/leases/000001.json", content)
        assert read_lease(store, RUN, 1) is None


def test_a_living_generation_is_left_alone_even_if_its_record_is_spoilt() -> None:
    """The record cannot be read, the lease can: it is the lease that says whether somebody lives."""
    store = MemoryStore()
    new_run(store)
    lease = Lease(store, begin(store), lease_s=5.0)
    lease.renew(step=0)
    store.put(f"runs/{RUN}/generations/000002.json", b"spoilt")
    with pytest.raises(RunBusyError, match="generation 2"):
        start_generation(store, RUN, info={}, lease_s=5.0, clock=_Living(lease))
    lease.end({"kind": "killed"})
    assert begin(store).generation == 3


def test_without_conditional_writes_the_fallback_is_loud(juice: JuiceGateway, tmp_path: Path) -> None:
    """Records get a token, the smallest wins, the notice says what is not guaranteed; zombies are still found out."""
    store = juice.open(f"fallback-{abs(hash(tmp_path)):x}")
    claim = new_run(store)
    assert not claim.fenced
    assert any("ignores conditional writes" in notice for notice in claim.notices)
    save(store, ManifestRef(10, 1))
    Lease(store, claim, lease_s=1.0).end({"kind": "killed"})
    second = begin(store)
    assert (second.generation, second.begin) == (2, ManifestRef(10, 1))
    write(store, ManifestRef(20, 1))
    with pytest.raises(FencedError):
        commit_manifest(store, RUN, ManifestRef(20, 1))
    save(store, ManifestRef(20, 2))
    assert latest(store) == ManifestRef(20, 2)
