"""Many starts at once: at every moment at most one generation lives, and whoever lost is told to whom; with and without conditional writes."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpointing import RUN, SPEC, begin, latest, new_run, save
from torchrelay.checkpoint.generation import GenerationClaim, Lease, open_run, read_lease, read_run, start_generation
from torchrelay.checkpoint.history import Generation, check_fence, read_history
from torchrelay.checkpoint.host import this_process
from torchrelay.checkpoint.layout import ManifestRef, generation_key, generations_prefix
from torchrelay.errors import ConflictError, FencedError, RunBusyError, RunMismatchError, StoreUnavailableError
from torchrelay.store.base import Capabilities, Created, Listing, ObjectStore, Payload
from torchrelay.store.files import FileStore
from torchrelay.store.memory import MemoryStore
from torchrelay.testing.clock import FakeClock
from torchrelay.testing.faulty_store import FaultyStore

_STARTERS = 16
_TIMEOUT_S = 60.0


class _MeetingStore:
    """Passes calls on; all starters meet before each of them writes its generation record, so that all have chosen the same number."""

    def __init__(self, inner: ObjectStore, barrier: threading.Barrier) -> None:
        self._inner, self._barrier = inner, barrier
        self.url, self.get, self.list = inner.url, inner.get, inner.list
        self.delete, self.probe = inner.delete, inner.probe

    def create(self, key: str, data: bytes) -> Created:
        """Meet, then create."""
        self._meet(key)
        return self._inner.create(key, data)

    def put(self, key: str, data: Payload) -> None:
        """Meet, then put."""
        self._meet(key)
        self._inner.put(key, data)

    def _meet(self, key: str) -> None:
        if "/generations/" in key:
            self._barrier.wait(_TIMEOUT_S)


class _Plain(MemoryStore):
    """A store that ignores the condition of a conditional write, as some servers do: it answers that it has created, and has replaced."""

    def create(self, key: str, data: bytes) -> Created:
        """Replace."""
        self.put(key, data)
        return Created(ours=True, data=data)

    def probe(self) -> Capabilities:
        """What a probe would find."""
        return Capabilities(create=False, checksum=False)


class _Settled:
    """A clock whose sleep lasts until all starters sleep."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.monotonic, self._barrier = time.monotonic, barrier

    def sleep(self, seconds: float) -> None:
        """Wait for the others."""
        self._barrier.wait(_TIMEOUT_S)


class _Impatient:
    """A clock that asks again soon; its seconds are real."""

    def __init__(self) -> None:
        self.monotonic, self._tick = time.monotonic, threading.Event()

    def sleep(self, seconds: float) -> None:
        """Let others run."""
        self._tick.wait(min(seconds, 0.002))


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """Each kind of store that needs no server, with a run."""
    store: ObjectStore = MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store")
    open_run(store, SPEC, provenance={})
    return store


def _all_at_once(start: Callable[[int], GenerationClaim]) -> tuple[list[GenerationClaim], list[RunBusyError]]:
    """Start from sixteen threads; return who won and what the others were told."""

    def attempt(number: int) -> GenerationClaim | RunBusyError:
        try:
            return start(number)
        except RunBusyError as error:
            return error

    with ThreadPoolExecutor(_STARTERS) as executor:
        results = list(executor.map(attempt, range(_STARTERS)))
    claims = [result for result in results if isinstance(result, GenerationClaim)]
    return claims, [result for result in results if isinstance(result, RunBusyError)]


def test_of_sixteen_that_chose_one_number_exactly_one_wins(store: ObjectStore) -> None:
    """Three generations in turn; the others are told which generation won, and how to see who it is."""
    for number in (1, 2, 3):
        meeting = _MeetingStore(store, threading.Barrier(_STARTERS))
        claims, refused = _all_at_once(lambda _: begin(meeting))  # noqa: B023 - called before the next turn
        assert [claim.generation for claim in claims] == [number]
        assert len(refused) == _STARTERS - 1
        assert {str(error) for error in refused} == {
            f"another start of run 'r' won generation {number}\n  hint: torchrelay show r"
        }
        newest = read_history(store, RUN).newest
        assert newest is not None
        assert newest.number == number
        Lease(store, claims[0], lease_s=60.0).end({"kind": "killed"})


def test_sixteen_that_all_want_a_turn_never_live_at_once(store: ObjectStore) -> None:
    """Each tries until it had its generation, saves one step and ends: no two overlap, no number is missing, no step is lost."""
    alive = threading.Semaphore(1)
    deadline = time.monotonic() + _TIMEOUT_S

    def turn(_: int) -> int:
        while True:
            assert time.monotonic() < deadline
            try:
                claim = start_generation(store, RUN, info={}, lease_s=_TIMEOUT_S, clock=_Impatient())
                break
            except RunBusyError:
                continue
        assert alive.acquire(blocking=False), "two generations live at once"
        lease = Lease(store, claim, lease_s=_TIMEOUT_S)
        lease.renew(step=claim.begin_step)
        save(store, ManifestRef(claim.begin_step + 1, claim.generation))
        lease.renew(step=claim.begin_step + 1)
        alive.release()
        lease.end({"kind": "completed"})
        return claim.generation

    with ThreadPoolExecutor(_STARTERS) as executor:
        assert sorted(executor.map(turn, range(_STARTERS))) == list(range(1, _STARTERS + 1))
    assert read_history(store, RUN).line == tuple(ManifestRef(number, number) for number in range(1, _STARTERS + 1))


class _Interrupted(MemoryStore):
    """A store that lets somebody else act before its n-th call from now."""

    def interrupt(self, number: int, act: Callable[[], None]) -> None:
        """Arm it."""
        self._left, self._act = number, act

    _left = 0

    def _tick(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()

    def create(self, key: str, data: bytes) -> Created:
        """Counted."""
        self._tick()
        return super().create(key, data)

    def get(
        self, key: str, *, offset: int = 0, length: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """Counted."""
        self._tick()
        return super().get(key, offset=offset, length=length, into=into)

    def list(self, prefix: str, *, after: str = "", limit: int | None = None) -> Listing:
        """Counted."""
        self._tick()
        return super().list(prefix, after=after, limit=limit)


def _start_without_waiting(store: ObjectStore) -> GenerationClaim | ConflictError:
    """Start, but do not wait for a lease to lapse."""
    try:
        return start_generation(store, RUN, info={}, lease_s=5.0, clock=FakeClock(), cancelled=lambda: True)
    except ConflictError as error:
        return error


def test_a_rival_that_starts_at_any_moment_is_not_succeeded_while_it_lives() -> None:
    """Before every single call of a start another one runs from beginning to end: one of the two has the generation, never both."""
    won_by = []
    for number in range(1, 100):
        store = _Interrupted()
        claim = new_run(store)
        save(store, ManifestRef(10, 1))
        Lease(store, claim, lease_s=5.0).end({"kind": "killed"})
        rivals: list[GenerationClaim | ConflictError] = []
        store.interrupt(number, lambda: rivals.append(_start_without_waiting(store)))  # noqa: B023 - this turn's
        mine = _start_without_waiting(store)
        if not rivals:
            break
        claims = [result for result in (mine, *rivals) if isinstance(result, GenerationClaim)]
        assert [claim.generation for claim in claims] == [2], number
        won_by.append("mine" if claims[0] is mine else "rival")
    assert set(won_by) == {"rival"}
    assert len(won_by) > 10


def test_a_living_lease_keeps_sixteen_away(store: ObjectStore) -> None:
    """While it is renewed, nobody gets in; when it stands still for its term, one does; its old holder is told which."""
    claim = begin(store)
    lease = Lease(store, claim, lease_s=5.0)
    lock = threading.Lock()

    class Renewing(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            with lock:
                lease.renew(step=1)

    lease.renew(step=0)
    claims, refused = _all_at_once(lambda _: start_generation(store, RUN, info={}, lease_s=5.0, clock=Renewing()))
    assert not claims
    holder = this_process()
    assert {str(error).splitlines()[0] for error in refused} == {
        f"run 'r' is being trained by generation 1 on host {holder.host} (pid {os.getpid()})"
    }
    meeting = _MeetingStore(store, threading.Barrier(_STARTERS))
    claims, refused = _all_at_once(lambda _: begin(meeting))
    assert [claim.generation for claim in claims] == [2]
    with pytest.raises(FencedError, match="generation 1 of run 'r' has been succeeded by generation 2"):
        lease.renew(step=2)


def test_a_lease_says_who_how_far_and_how_it_ended() -> None:
    """Its counter rises with each write; an outage of the store ends nothing, and what was missed is written when it is back."""
    store = MemoryStore()
    claim = new_run(store)
    lease = Lease(FaultyStore(store, fail_at=3), claim, lease_s=7.5)
    lease.renew(step=3)
    first = read_lease(store, RUN, 1)
    assert first is not None
    assert (first.generation, first.lease_s, first.step, first.holder) == (1, 7.5, 3, this_process())
    assert not first.ended
    with pytest.raises(StoreUnavailableError):
        lease.renew(step=4)
    assert read_lease(store, RUN, 1) == first
    lease.renew(step=5)
    second = read_lease(store, RUN, 1)
    assert second is not None
    assert second == replace(first, seq=second.seq, step=5)
    assert second.seq > first.seq
    lease.end({"kind": "completed"}, step=6)
    last = read_lease(store, RUN, 1)
    assert last is not None
    assert (last.ended, last.outcome, last.step) == (True, {"kind": "completed"}, 6)


_CHILD = """
import sys
from pathlib import Path
from torchrelay.checkpoint.generation import start_generation
from torchrelay.store.files import FileStore
print(start_generation(FileStore(Path(sys.argv[1])), "r", info={}, lease_s=60.0).generation, flush=True)
sys.stdin.read()
"""


def test_a_launcher_killed_before_its_first_lease_is_not_waited_for(tmp_path: Path) -> None:
    """A real process that won and wrote nothing else: waited for while it lives, known to be gone at once, even before it is reaped."""
    store = FileStore(tmp_path)
    open_run(store, SPEC, provenance={})
    command = [sys.executable, "-c", _CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "1\n"
        assert "stopped while waiting" in str(_start_without_waiting(store))
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        claim = _start_without_waiting(store)
    assert isinstance(claim, GenerationClaim)
    assert claim.generation == 2


def test_an_unreadable_record_of_the_newest_generation_is_stepped_over() -> None:
    """Its number is not given again, its saves do not count, and the notice names it."""
    store = MemoryStore()
    new_run(store)
    save(store, ManifestRef(10, 1))
    begin(store)
    save(store, ManifestRef(20, 2))
    store.put(generation_key(RUN, 2), b"garbage")
    claim = begin(store)
    assert (claim.generation, claim.begin) == (3, ManifestRef(10, 1))
    assert claim.notices == (f"generation record {generation_key(RUN, 2)} is unreadable and was stepped over",)
    assert latest(store) == ManifestRef(10, 1)


def test_without_conditional_writes_exactly_one_of_sixteen_goes_on() -> None:
    """All wrote a record of their own and saw each other's: the smallest name wins, and says how little that is worth."""
    store = _Plain()
    open_run(store, SPEC, provenance={})
    meeting = _MeetingStore(store, threading.Barrier(_STARTERS))
    settled = threading.Barrier(_STARTERS)
    claims, refused = _all_at_once(
        lambda _: start_generation(meeting, RUN, info={}, lease_s=1.0, clock=_Settled(settled))
    )
    assert len(claims) == 1
    assert len(refused) == _STARTERS - 1
    assert all("won generation 1" in str(error) for error in refused)
    assert not claims[0].fenced
    assert any(
        "ignores conditional writes" in notice and "do not start a run twice" in notice for notice in claims[0].notices
    )
    records = [item.key for item in store.list(generations_prefix(RUN)).objects]
    newest = read_history(store, RUN).newest
    assert newest is not None
    assert (len(records), newest.key) == (_STARTERS, min(records))


@pytest.mark.parametrize(("token", "wins"), [("0" * 16, False), ("f" * 16 + "f", True)])
def test_without_conditional_writes_a_rival_is_seen_while_settling(token: str, wins: bool) -> None:
    """Its record appears after ours was written: the smaller name is the generation for both sides, and for every reader."""
    store = _Plain()
    open_run(store, SPEC, provenance={})
    rival = Generation(run_id=RUN, number=1, begin=None, lineage=(), nonce=secrets.token_hex(8), info={}, token=token)

    class Rivalled(FakeClock):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            store.put(rival.key, rival.to_bytes())

    if wins:
        assert start_generation(store, RUN, info={}, lease_s=1.0, clock=Rivalled()).generation == 1
    else:
        with pytest.raises(RunBusyError, match="won generation 1"):
            start_generation(store, RUN, info={}, lease_s=1.0, clock=Rivalled())
    newest = read_history(store, RUN).newest
    assert newest is not None
    assert (newest.token == token) is not wins
    check_fence(store, RUN, 1)
    assert begin(store).generation == 2
    with pytest.raises(FencedError, match="generation 2"):
        check_fence(store, RUN, 1)


@pytest.mark.parametrize(
    ("field", "value", "was"),
    [
        ("job", "other.module:build", SPEC.job),
        ("options", {"width": 64}, {}),
        ("total_steps", 999, 1000),
        ("global_batch", 17, SPEC.global_batch),
        ("seed", 1, 0),
    ],
)
def test_another_spec_is_refused_by_the_field_that_differs(
    field: str, value: Any, was: Any, store: ObjectStore
) -> None:
    """Both values are named, nothing else is, and the run stays what it was."""
    other = replace(SPEC, **{field: value})
    with pytest.raises(RunMismatchError) as caught:
        open_run(store, other, provenance={})
    assert str(caught.value).splitlines()[0] == (
        f"run 'r' exists with another spec ({field}: the run has {was!r}, this spec has {value!r})"
    )
    assert read_run(store, RUN)["spec"][field] == was


def test_sixteen_specs_of_one_name_make_one_run(store: ObjectStore) -> None:
    """Whoever is first decides; those with the same spec go on, the others are refused."""
    specs = [replace(SPEC, run_id="new", seed=number % 2) for number in range(_STARTERS)]

    def create(number: int) -> int | None:
        try:
            open_run(store, specs[number], provenance={"number": number})
        except RunMismatchError:
            return None
        return specs[number].seed

    with ThreadPoolExecutor(_STARTERS) as executor:
        seeds = list(executor.map(create, range(_STARTERS)))
    there = read_run(store, "new")["spec"]["seed"]
    assert seeds == [there if number % 2 == there else None for number in range(_STARTERS)]
