"""History against a tree: each generation only knows where it began; zombies, rollbacks, marks and lost records in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpointing import RUN, begin, new_run, save
from torchrelay.checkpoint.history import (
    Generation,
    History,
    chain,
    check_fence,
    next_number,
    read_history,
    successor_lineage,
)
from torchrelay.checkpoint.layout import ManifestRef, damage_key, generation_key, generations_prefix, manifests_prefix
from torchrelay.checkpoint.reader import clear_damage, loss_trace, mark_damaged
from torchrelay.errors import FencedError
from torchrelay.store.base import Listing
from torchrelay.store.memory import MemoryStore

_STEP = st.integers(1, 25)
_PICK = st.integers(0, 50)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, 4)),
        st.tuples(st.just("start"), st.integers(0, 3)),
        st.tuples(st.just("zombie"), _PICK, _STEP),
        st.tuples(st.just("late"), _PICK, _STEP),
        st.tuples(st.just("damage"), _PICK),
        st.tuples(st.just("repair"), _PICK),
        st.tuples(st.just("spoil"), st.just(0)),
        st.tuples(st.just("forget"), st.just(0)),
    ),
    max_size=50,
)


class _Unordered(MemoryStore):
    """A store whose listings come in any order."""

    def list(self, prefix: str, *, after: str = "", limit: int | None = None) -> Listing:
        """Shuffle what was asked for."""
        found = super().list(prefix, after=after, limit=limit)
        rows = random.Random(len(found.objects)).sample(found.objects, len(found.objects))
        return Listing(objects=tuple(rows), server_time_s=found.server_time_s)


@dataclass
class _Tree:
    """The model: where each generation began, which names exist, which are marked, which records can be read or are there at all."""

    begins: dict[int, ManifestRef | None] = field(default_factory=dict)
    names: set[ManifestRef] = field(default_factory=set)
    marked: set[ManifestRef] = field(default_factory=set)
    spoilt: set[int] = field(default_factory=set)
    ancestors: dict[int, ManifestRef | None] = field(default_factory=dict)
    """All begins ever, those of records that were lost meanwhile too."""

    @property
    def newest(self) -> int:
        """The newest generation whose record can be read; 0 if there is none."""
        return max(self.begins.keys() - self.spoilt, default=0)

    def line(self) -> list[ManifestRef]:
        """Walk from the newest generation to where it began, to where that one began, and so on."""
        found: list[ManifestRef] = []
        number, top = self.newest, 10**9
        while number:
            begin = self.ancestors.get(number)
            low = begin.step if begin else 0
            found += [ref for ref in self.names if ref.generation == number and low < ref.step <= top]
            number, top = (begin.generation, begin.step) if begin else (0, 0)
        return sorted(found)

    def visible(self) -> list[ManifestRef]:
        """What a start may begin at."""
        return [ref for ref in self.line() if ref not in self.marked]


class _Run:
    """The run in a store, driven along with its model; records are written as a start writes them."""

    def __init__(self) -> None:
        self.store, self.tree = _Unordered(), _Tree()

    def history(self) -> History:
        """What the store says."""
        return read_history(self.store, RUN)

    def apply(self, event: tuple[Any, ...]) -> None:
        """Let one thing happen, if it can."""
        getattr(self, event[0])(*event[1:])

    def start(self, back: int) -> None:
        """Begin at the newest checkpoint, or some earlier."""
        history = self.history()
        places: list[ManifestRef | None] = [None, *history.line]
        place = places[max(0, len(places) - 1 - back)]
        assert history.next_number not in self.tree.ancestors  # a number is given once, even if its record is gone
        record = Generation(
            run_id=RUN,
            number=history.next_number,
            begin=place,
            lineage=successor_lineage(history.newest, place),
            nonce="",
            info={},
        )
        self.store.put(record.key, record.to_bytes())
        self.tree.begins[record.number] = self.tree.ancestors[record.number] = place

    def commit(self, steps: int) -> None:
        """Save past the newest of the line."""
        line = self.tree.line()
        number = self.tree.newest
        if number:
            begin = self.tree.begins[number]
            self._manifest(
                ManifestRef(max([0, *(ref.step for ref in line), begin.step if begin else 0]) + steps, number)
            )

    def zombie(self, pick: int, step: int) -> None:
        """Save as a generation that was succeeded, past the place where it was, as one that sleeps through it does."""
        old = sorted(self.tree.ancestors.keys() - {self.tree.newest})
        if not old:
            return
        number = old[pick % len(old)]
        handover = [ref.step for ref in self.tree.begins.values() if ref and ref.generation == number]
        before = self.history().line
        self._manifest(ManifestRef(max([0, *handover]) + step, number))
        if number < self.tree.newest:
            assert self.history().line == before

    def late(self, pick: int, step: int) -> None:
        """A manifest of any generation at any step turns up: it counts if that generation's line passes there."""
        numbers = sorted(self.tree.ancestors)
        self._manifest(ManifestRef(step, numbers[pick % len(numbers)]))

    def damage(self, pick: int) -> None:
        """Mark something that exists."""
        if self.tree.names:
            ref = sorted(self.tree.names)[pick % len(self.tree.names)]
            self.store.put(damage_key(RUN, ref), b"")
            self.tree.marked.add(ref)

    def repair(self, pick: int) -> None:
        """Take a mark away."""
        if self.tree.marked:
            ref = sorted(self.tree.marked)[pick % len(self.tree.marked)]
            clear_damage(self.store, RUN, ref)
            self.tree.marked.discard(ref)

    def spoil(self, _: int) -> None:
        """The newest record becomes unreadable."""
        if self.tree.newest:
            number = self.tree.newest
            self.store.put(generation_key(RUN, number), b"garbage")
            self.tree.spoilt.add(number)

    def forget(self, _: int) -> None:
        """A power cut takes the newest record, but not what its generation saved since."""
        number = self.tree.newest
        if number and any(ref.generation == number for ref in self.tree.names):
            self.store.delete([generation_key(RUN, number)])
            del self.tree.begins[number]

    def _manifest(self, ref: ManifestRef) -> None:
        self.store.put(ref.key(RUN), b"")  # only the name is read
        self.tree.names.add(ref)


@given(_EVENTS)
def test_history_is_what_the_tree_says(events: list[tuple[Any, ...]]) -> None:
    """After every event: the line, its end, the marks and the unreadable records; steps rise along the line and generations never fall."""
    run = _Run()
    run.start(0)
    for event in events:
        run.apply(event)
        history, tree = run.history(), run.tree
        visible = tree.visible()
        assert list(history.line) == visible
        assert history.latest == (visible[-1] if visible else None)
        assert (history.newest.number if history.newest else 0) == tree.newest
        assert history.damaged == tree.marked
        newer = {number for number in tree.spoilt & tree.begins.keys() if number > tree.newest}
        assert set(history.unreadable) == {generation_key(RUN, number) for number in newer}
        assert history.next_number > max([0, *tree.begins, *(ref.generation for ref in tree.names)])
        steps = [ref.step for ref in history.line]
        assert steps == sorted(set(steps))
        numbers = [ref.generation for ref in history.line]
        assert numbers == sorted(numbers)


@given(st.permutations([ManifestRef(step, generation) for step in range(1, 5) for generation in range(1, 4)]))
def test_the_order_of_a_listing_says_nothing(names: list[ManifestRef]) -> None:
    """Every generation wrote every step; those that count are the same whatever order they are seen in."""
    second = _record(2, ManifestRef(2, 1), _record(1, None, None))
    third = _record(3, ManifestRef(3, 2), second)
    assert chain(third, names) == (ManifestRef(1, 1), ManifestRef(2, 1), ManifestRef(3, 2), ManifestRef(4, 3))
    assert chain(third, iter([*names, *names[:3]]))[-1] == ManifestRef(4, 3)
    assert chain(None, names) == ()


def _record(number: int, begin: ManifestRef | None, newest: Generation | None) -> Generation:
    lineage = successor_lineage(newest, begin)
    return Generation(run_id=RUN, number=number, begin=begin, lineage=lineage, nonce="", info={})


@pytest.mark.parametrize("saves", [0, 1, 3])
def test_a_line_through_many_generations_is_whole(saves: int) -> None:
    """A thousand deaths: what each left counts, its zombie's later saves do not; the record grows by those that left something only."""
    newest: Generation | None = None
    names: list[ManifestRef] = []
    zombies: list[ManifestRef] = []
    line: list[ManifestRef] = []
    for number in range(1, 1001):
        newest = _record(number, line[-1] if line else None, newest)
        first = newest.begin_step
        kept = saves if number % 2 else 0
        own = [ManifestRef(first + step, number) for step in range(1, kept + 1)]
        names += own
        line += own
        zombies += [ManifestRef(first + step, number) for step in range(kept + 1, kept + 4)]
        # Its successor has not begun yet: of the newest, nothing is a zombie's.
        assert chain(newest, [*zombies[:-3], *names]) == tuple(line)
    assert newest is not None
    assert len(newest.lineage) == (500 if saves else 0)
    assert len(newest.to_bytes()) < 300 + 12 * len(newest.lineage)


def test_a_rollback_of_a_rollback_forgets_both() -> None:
    """Back to 20, then on, then back to 10: the line is the last choice alone."""
    first = _record(1, None, None)
    second = _record(2, ManifestRef(20, 1), first)
    third = _record(3, ManifestRef(10, 1), second)
    scratch = _record(4, None, third)
    names = [ManifestRef(step, 1) for step in (10, 20, 30)] + [
        ManifestRef(25, 2),
        ManifestRef(30, 2),
        ManifestRef(15, 3),
    ]
    assert chain(second, names) == (*names[:2], *names[3:5])
    assert chain(third, names) == (names[0], names[5])
    assert chain(scratch, names) == ()
    assert chain(scratch, [*names, ManifestRef(5, 4)]) == (ManifestRef(5, 4),)
    assert next_number([1, 2, 3, 4], [*names, ManifestRef(1, 9)]) == 10
    with pytest.raises(ValueError, match="no generation"):
        successor_lineage(None, ManifestRef(10, 1))


def test_of_two_records_of_one_number_the_smaller_name_is_the_generation() -> None:
    """Only where a store cannot create: every reader chooses the same, and a spoilt one is not replaced by its rival."""
    store = MemoryStore()
    new_run(store)
    for number, token in ((2, "ff"), (2, "0a"), (3, "b")):
        record = Generation(run_id=RUN, number=number, begin=None, lineage=(), nonce="", info={}, token=token)
        store.put(record.key, record.to_bytes())
    newest = read_history(store, RUN).newest
    assert newest is not None
    assert (newest.number, newest.token) == (3, "b")
    store.put(newest.key, b"")
    history = read_history(store, RUN)
    assert history.newest is not None
    assert (history.newest.number, history.newest.token) == (2, "0a")
    assert (history.unreadable, history.next_number) == ((newest.key,), 4)


def test_the_fence_sees_every_newer_generation() -> None:
    """By plain names and names with a token; not its own rivals of the same number, nor older ones."""
    for newer in ("000008.json", "000008.0a.json", "001000.json"):
        store = _Unordered()
        for name in ("000006.json", "000007.json", "000007.0a.json", "000007.ff.json"):
            store.put(generations_prefix(RUN) + name, b"")
        check_fence(store, RUN, 7)
        store.put(generations_prefix(RUN) + newer, b"")
        with pytest.raises(FencedError, match=rf"generation 7 .* succeeded by generation {int(newer[:6])}"):
            check_fence(store, RUN, 7)


def test_foreign_names_neither_fence_nor_blind_the_fence() -> None:
    """A backup copy beside the records, or a note, changes nothing for anybody."""
    store = MemoryStore()
    claim = new_run(store)
    save(store, ManifestRef(10, 1))
    for name in ("000001.json.bak", "000001.json~", "000009.txt", "9.json", "notes", "zzz.json"):
        store.put(f"{generations_prefix(RUN)}{name}".replace("~", "="), b"x")
        store.put(f"{manifests_prefix(RUN)}{name}".replace("~", "="), b"x")
    check_fence(store, RUN, claim.generation)
    assert begin(store).begin == ManifestRef(10, 1)
    with pytest.raises(FencedError, match="generation 2"):
        check_fence(store, RUN, claim.generation)


def test_the_loss_trace_is_that_of_the_line() -> None:
    """A damaged checkpoint that others build upon is part of it; one that the run stepped back over is not, nor is a zombie's."""
    store = MemoryStore()
    new_run(store)
    for step in (10, 20, 35):
        save(store, ManifestRef(step, 1))
    mark_damaged(store, RUN, ManifestRef(10, 1), "bit rot")
    assert loss_trace(store, RUN) == [(10, 1.0), (20, 1.0), (35, 1.0)]
    mark_damaged(store, RUN, ManifestRef(35, 1), "bit rot")
    assert begin(store).begin == ManifestRef(20, 1)
    save(store, ManifestRef(30, 2))
    assert loss_trace(store, RUN) == [(10, 1.0), (20, 1.0), (30, 2.0)]
