"""Every store call of a save and of a start fails once, before and after it took effect; the process dies at each of them.

Afterwards the store holds the old checkpoint or the new one, whole; never a mixture, never neither; and the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.checkpointing import RUN, SPEC, begin, contents, expected, latest, make_shards, new_run, save, write
from torchrelay.checkpoint.commit import commit_manifest
from torchrelay.checkpoint.generation import open_run
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef, manifests_prefix
from torchrelay.checkpoint.manifest import RecordSummary, ShardRecord, assemble_manifest
from torchrelay.checkpoint.reader import clear_damage, mark_damaged
from torchrelay.errors import FencedError, StoreUnavailableError
from torchrelay.store.memory import MemoryStore
from torchrelay.testing.faulty_store import FaultyStore, SimulatedCrash

Effect = Literal["before", "after"]
EFFECTS: list[Effect] = ["before", "after"]
ERRORS: list[Callable[[], BaseException]] = [lambda: StoreUnavailableError("injected"), SimulatedCrash]


def _calls_of(action: Callable[[FaultyStore], object], prepared: MemoryStore) -> int:
    counted = FaultyStore(prepared)
    action(counted)
    return counted.calls


def _prepared() -> MemoryStore:
    store = MemoryStore()
    new_run(store)
    save(store, ManifestRef(10, 1))
    return store


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("error", ERRORS, ids=["error", "death"])
def test_a_save_that_breaks_anywhere_leaves_the_old_or_the_new(
    effect: Effect, error: Callable[[], BaseException]
) -> None:
    """For every n; then a successor begins at what counts, keeps it on the line and saves on."""
    old, new, next_one = ManifestRef(10, 1), ManifestRef(20, 1), ManifestRef(30, 2)
    calls = _calls_of(lambda store: save(store, new), _prepared())
    assert calls >= 8
    seen = set()
    for number in range(1, calls + 1):
        store = _prepared()
        with pytest.raises((StoreUnavailableError, SimulatedCrash)):
            save(FaultyStore(store, fail_at=number, effect=effect, error=error), new)
        now = latest(store)
        assert now in (old, new), number
        assert now is not None
        assert contents(store, now) == expected(now), number
        claim = begin(store)
        assert claim.begin in (old, new), number
        assert claim.begin is not None
        assert claim.begin >= now
        assert contents(store, claim.begin) == expected(claim.begin), number
        save(store, next_one)
        line = read_history(store, RUN).line
        assert line == ((old, next_one) if claim.begin == old else (old, new, next_one)), number
        assert contents(store, next_one) == expected(next_one)
        seen.add((now, claim.begin))
    # The interesting cases did occur: nothing written, all written but not committed, committed.
    assert {(old, old), (old, new)} <= seen
    assert ((new, new) in seen) == (effect == "after")


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_save_that_failed_is_repeated_and_is_then_whole(effect: Effect) -> None:
    """The courier tries again from the start: for every n the second try commits, and the bytes are right."""
    new = ManifestRef(20, 1)
    calls = _calls_of(lambda store: save(store, new), _prepared())
    for number in range(1, calls + 1):
        store = _prepared()
        with pytest.raises(StoreUnavailableError):
            save(FaultyStore(store, fail_at=number, effect=effect), new)
        save(store, new)
        assert latest(store) == new
        assert contents(store, new) == expected(new)


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("error", ERRORS, ids=["error", "death"])
@pytest.mark.parametrize("pending", [False, True])
def test_a_start_that_breaks_anywhere_can_be_repeated(
    effect: Effect, error: Callable[[], BaseException], pending: bool
) -> None:
    """For every n: no number is given twice, nothing committed is lost, and a commit left pending is finished by somebody."""

    def prepared() -> MemoryStore:
        store = _prepared()
        if pending:
            write(store, ManifestRef(20, 1))
        return store

    calls = _calls_of(begin, prepared())
    wanted = ManifestRef(20 if pending else 10, 1)
    for number in range(1, calls + 1):
        store = prepared()
        with pytest.raises((StoreUnavailableError, SimulatedCrash)):
            begin(FaultyStore(store, fail_at=number, effect=effect, error=error))
        claim = begin(store)
        assert claim.begin == wanted, number
        assert claim.generation in (2, 3)
        assert contents(store, wanted) == expected(wanted)
        assert read_history(store, RUN).newest is not None


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_run_that_could_not_be_created_can_be(effect: Effect) -> None:
    """For every n of creating the run."""
    calls = _calls_of(lambda store: open_run(store, SPEC, provenance={}), MemoryStore())
    for number in range(1, calls + 1):
        store = MemoryStore()
        with pytest.raises(StoreUnavailableError):
            open_run(FaultyStore(store, fail_at=number, effect=effect), SPEC, provenance={})
        assert new_run(store).generation == 1


def test_incomplete_records_are_not_committed_by_anybody() -> None:
    """One rank of two wrote its part: the commit says so, and a successor begins before it."""
    store = _prepared()
    from concurrent.futures import ThreadPoolExecutor

    from torchrelay.checkpoint.commit import write_shard

    with ThreadPoolExecutor(1) as executor:
        write_shard(store, make_shards(ManifestRef(20, 1))[1], executor=executor)
    assert commit_manifest(store, RUN, ManifestRef(20, 1)) is None
    assert begin(store).begin == ManifestRef(10, 1)


class Relay(RuleBasedStateMachine):
    """Saves, faults, deaths, zombies, damage and new generations in any order, against a model of a list and a set."""

    @initialize()
    def start(self) -> None:
        """An empty run with its first generation."""
        self.store = MemoryStore()
        self.generation = new_run(self.store).generation
        self.line: list[ManifestRef] = []
        self.damaged: set[ManifestRef] = set()
        self.pending: set[ManifestRef] = set()
        self.step = 0

    def _visible(self) -> list[ManifestRef]:
        return [ref for ref in self.line if ref not in self.damaged]

    def _next(self) -> ManifestRef:
        self.step += 1
        return ManifestRef(self.step, self.generation)

    @rule()
    def save(self) -> None:
        """A save that works."""
        ref = self._next()
        save(self.store, ref)
        self.line.append(ref)

    @rule(number=st.integers(1, 12), effect=st.sampled_from(EFFECTS), dies=st.booleans())
    def save_that_breaks(self, number: int, effect: Effect, dies: bool) -> None:
        """A save whose n-th call fails; it may have got further than that."""
        ref = self._next()
        faulty = FaultyStore(self.store, fail_at=number, effect=effect, error=ERRORS[dies])
        try:
            save(faulty, ref)
        except (StoreUnavailableError, SimulatedCrash):
            pass
        if ref.key(RUN) in {item.key for item in self.store.list(manifests_prefix(RUN)).objects}:
            assert contents(self.store, ref) == expected(ref)
            self.line.append(ref)
        else:
            self.pending.add(ref)

    @rule()
    def successor(self) -> None:
        """The generation dies; the next one begins at the newest checkpoint, or finishes one that was only not committed."""
        before = self._visible()[-1] if self._visible() else None
        claim = begin(self.store)
        assert claim.generation > self.generation
        if claim.begin != before:
            assert claim.begin in self.pending
            assert claim.begin is not None
            assert before is None or claim.begin > before
            self.line.append(claim.begin)
        self.line = [ref for ref in self.line if claim.begin is not None and ref <= claim.begin]
        self.pending.clear()
        self.generation = claim.generation
        self.step = claim.begin_step

    @precondition(lambda self: self.generation > 1)
    @rule(data=st.data())
    def zombie(self, data: st.DataObject) -> None:
        """An old generation wakes up: its commit is refused, and even a PUT that was on its way already changes nothing."""
        old = data.draw(st.integers(1, self.generation - 1))
        ref = ManifestRef(self.step + data.draw(st.integers(1, 3)), old)
        if ref in self.line:
            return
        write(self.store, ref)
        with pytest.raises(FencedError):
            commit_manifest(self.store, RUN, ref)
        if data.draw(st.booleans()):
            keys = [item.key for item in self.store.list(f"runs/{RUN}/records/{ref}/").objects]
            raw = [bytes(self.store.get(key)) for key in keys]
            head = ShardRecord.from_bytes(raw[0], where="zombie").head
            assert head is not None
            parsed = [(RecordSummary.parse(body, where="zombie")[0], len(body)) for body in raw]
            self.store.put(ref.key(RUN), assemble_manifest(head, parsed).to_bytes())

    @precondition(lambda self: bool(self._visible()))
    @rule()
    def damage(self) -> None:
        """The newest checkpoint is found damaged."""
        ref = self._visible()[-1]
        mark_damaged(self.store, RUN, ref, "a test")
        self.damaged.add(ref)

    @precondition(lambda self: bool(self.damaged))
    @rule()
    def verified(self) -> None:
        """One that was marked is found whole after all."""
        ref = min(self.damaged)
        clear_damage(self.store, RUN, ref)
        self.damaged.discard(ref)

    @invariant()
    def the_line_is_the_models(self) -> None:
        """What the store says is what the model says, and the newest is whole."""
        assert list(read_history(self.store, RUN).line) == sorted(self._visible())
        now = latest(self.store)
        if now is not None:
            assert contents(self.store, now) == expected(now)


Relay.TestCase.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRelay = Relay.TestCase
