"""Which checkpoints are kept: never the last clean one gone, no gap in the ladder, nothing superseded by what nobody verified."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpointing import RUN, begin, contents, expected, latest, new_run, save
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.marks import list_forgotten, mark_verified, pin, unpin
from torchrelay.checkpoint.reader import loss_trace, mark_damaged, verify_and_mark
from torchrelay.checkpoint.retention import Choice, Dated, RetentionPolicy, choose, forget, plan_retention
from torchrelay.errors import ConfigError, StoreUnavailableError
from torchrelay.store.memory import MemoryStore
from torchrelay.testing.faulty_store import FaultyStore

_NEWEST_ONLY = RetentionPolicy(newest=2, ladder_base_s=0.0)


def _line(*, steps: int = 10, interval_s: float = 10.0, verified: bool = True) -> list[Dated]:
    """Checkpoints at steps 1, 2, ... committed ``interval_s`` apart, the newest just now."""
    return [
        Dated(ref=ManifestRef(step, 1), age_s=(steps - step) * interval_s, verified=verified)
        for step in range(1, steps + 1)
    ]


def _kept(choices: list[Choice]) -> list[int]:
    return [item.ref.step for item in choices if not item.forget]


def test_the_newest_verified_are_kept_and_what_is_newer() -> None:
    """Two verified ones, and the unverified two after them; each decision has its reason."""
    line = [*_line(steps=8)[:6], *_line(steps=8, verified=False)[6:]]
    choices = choose(line, _NEWEST_ONLY)
    assert _kept(choices) == [5, 6, 7, 8]
    assert all(item.why for item in choices if item.forget)
    assert choices[-1].kept_by == ("the newest", "no older than they")


def test_nothing_is_forgotten_before_enough_are_verified() -> None:
    """However many there are: what is not known to be good supersedes nothing."""
    line = _line(steps=50, verified=False)
    assert len(_kept(choose(line, _NEWEST_ONLY))) == 50
    one = [*line[:-1], Dated(ref=line[-1].ref, age_s=0.0, verified=True)]
    assert len(_kept(choose(one, _NEWEST_ONLY))) == 50


def test_damaged_ones_count_for_nothing() -> None:
    """A verified one that was found damaged later does not supersede; it goes when newer ones do."""
    line = _line(steps=6)
    line[4] = Dated(ref=line[4].ref, age_s=10.0, verified=True, damaged=True)
    assert _kept(choose(line, _NEWEST_ONLY)) == [4, 5, 6]
    line = _line(steps=6)
    line[1] = Dated(ref=line[1].ref, age_s=40.0, verified=True, damaged=True)
    assert _kept(choose(line, RetentionPolicy(newest=2, every_steps=1))) == [1, 3, 4, 5, 6]


def test_pins_multiples_and_what_is_in_use() -> None:
    """Each rule keeps its own."""
    line = _line(steps=20)
    line[2] = Dated(ref=line[2].ref, age_s=line[2].age_s, verified=True, pinned=True)
    policy = RetentionPolicy(newest=1, every_steps=8, ladder_base_s=0.0)
    assert _kept(choose(line, policy, needed=[ManifestRef(5, 1)])) == [3, 5, 8, 16, 20]


@given(
    st.integers(1, 300),
    st.floats(1.0, 3000.0),
    st.integers(1, 4),
    st.floats(10.0, 2000.0),
    st.floats(0.0, 200_000.0),
)
def test_the_ladder_holds_whatever_passes_and_time_do(
    passes: int, interval_s: float, newest: int, base_s: float, top_s: float
) -> None:
    """A checkpoint each interval, a pass of retention after each: at the end no neighbours are further apart than the rule says, and few are left."""
    policy = RetentionPolicy(newest=newest, ladder_base_s=base_s, ladder_top_s=top_s)
    born: list[int] = []
    for now in range(passes):
        born.append(now)
        line = [Dated(ref=ManifestRef(b + 1, 1), age_s=(now - b) * interval_s, verified=True) for b in born]
        born = [step - 1 for step in _kept(choose(line, policy))]
    ages = [(passes - 1 - b) * interval_s for b in reversed(born)]
    assert ages[0] == 0.0
    assert len(born) >= min(passes, newest)
    # Whoever asks for a state from before an onset finds one about twice as old, or as far back as the ladder begins.
    for younger, older in pairwise(ages):
        assert older - younger <= max(younger, base_s) + interval_s + 1e-6
    assert ages[-1] >= min(top_s, (passes - 1) * interval_s) - 1e-6
    # Every second one is more than twice as old as the one two before it, once past the base: few are left.
    assert len(born) <= newest + 3 + 2 * max(0.0, math.log2(max(top_s, base_s) / base_s) + 1)


@pytest.mark.parametrize("bad", [{"newest": 0}, {"every_steps": -1}, {"ladder_top_s": -1.0}])
def test_a_policy_that_could_lose_all_is_refused(bad: dict[str, int]) -> None:
    """At least one is kept, whatever is asked for."""
    with pytest.raises(ConfigError):
        RetentionPolicy(**bad)


def _store(*steps: int) -> MemoryStore:
    store = MemoryStore()
    new_run(store)
    for step in steps:
        save(store, ManifestRef(step, 1))
    return store


def test_forgetting_keeps_the_losses_and_the_rest_of_the_line() -> None:
    """The curve of the run is what it was; the others restore."""
    store = _store(10, 20, 30, 40)
    curve = loss_trace(store, RUN)
    assert forget(store, RUN, ManifestRef(20, 1), why="a test")
    assert [ref.step for ref in read_history(store, RUN).line] == [10, 30, 40]
    assert loss_trace(store, RUN) == curve
    assert list_forgotten(store, RUN) == {ManifestRef(20, 1)}
    assert begin(store).begin == ManifestRef(40, 1)
    assert forget(store, RUN, ManifestRef(30, 1), why="a test")
    assert loss_trace(store, RUN) == curve
    assert contents(store, ManifestRef(40, 1)) == expected(ManifestRef(40, 1))


def test_what_is_needed_is_not_forgotten() -> None:
    """The newest, the one the generation began at, a pinned one: refused, whoever asks."""
    store = _store(10, 20)
    assert begin(store).begin == ManifestRef(20, 1)
    save(store, ManifestRef(30, 2))
    pin(store, RUN, ManifestRef(10, 1), why="mine")
    for ref in (ManifestRef(10, 1), ManifestRef(20, 1), ManifestRef(30, 2)):
        assert not forget(store, RUN, ref, why="a test")
    unpin(store, RUN, ManifestRef(10, 1))
    assert forget(store, RUN, ManifestRef(10, 1), why="a test")
    assert latest(store) == ManifestRef(30, 2)


@pytest.mark.parametrize("effect", ["before", "after"])
def test_forgetting_that_breaks_anywhere_can_be_repeated(effect: str) -> None:
    """For every store call: the curve is whole at every moment, and the second try finishes it."""
    counted = FaultyStore(_store(10, 20, 30))
    forget(counted, RUN, ManifestRef(20, 1), why="a test")
    for number in range(1, counted.calls + 1):
        store = _store(10, 20, 30)
        curve = loss_trace(store, RUN)
        with pytest.raises(StoreUnavailableError):
            forget(FaultyStore(store, fail_at=number, effect=effect), RUN, ManifestRef(20, 1), why="x")  # type: ignore[arg-type]
        assert loss_trace(store, RUN) == curve
        assert forget(store, RUN, ManifestRef(20, 1), why="again")
        assert loss_trace(store, RUN) == curve
        assert [ref.step for ref in read_history(store, RUN).line] == [10, 30]


def test_the_plan_follows_the_marks_in_the_store() -> None:
    """Verification supersedes, damage does not; a mark of damage is told from one of verification."""
    store = _store(10, 20, 30, 40)
    assert _kept(plan_retention(store, RUN, _NEWEST_ONLY)) == [10, 20, 30, 40]
    for step in (20, 30, 40):
        assert verify_and_mark(store, RUN, ManifestRef(step, 1)) > 0
    assert _kept(plan_retention(store, RUN, _NEWEST_ONLY)) == [30, 40]
    mark_damaged(store, RUN, ManifestRef(40, 1), "a test")
    assert _kept(plan_retention(store, RUN, _NEWEST_ONLY)) == [20, 30, 40]
    verify_and_mark(store, RUN, ManifestRef(40, 1))  # it was the reading
    assert _kept(plan_retention(store, RUN, _NEWEST_ONLY)) == [30, 40]
    mark_verified(store, RUN, ManifestRef(50, 1), size_bytes=1)  # a mark without a checkpoint
    assert _kept(plan_retention(store, RUN, _NEWEST_ONLY)) == [30, 40]
