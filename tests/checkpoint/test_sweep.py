"""Sweeping: every object is explained, only what counts for nobody goes, and dying or racing anywhere harms nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.checkpointing import RUN, begin, new_run
from tests.referring import is_whole, records_of, save_with, shards_with, sweep_all, write_with
from torchrelay.checkpoint.commit import commit_manifest, write_shard
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef, generation_key, pack_key, packs_prefix, records_prefix, run_prefix
from torchrelay.checkpoint.reader import load_manifest, verify_checkpoint
from torchrelay.checkpoint.retention import forget
from torchrelay.checkpoint.survey import Survey, take_survey
from torchrelay.checkpoint.sweep import plan_sweep
from torchrelay.errors import CorruptionError
from torchrelay.store.memory import MemoryStore
from torchrelay.testing.faulty_store import SimulatedCrash


def _statuses(survey: Survey) -> dict[str, str]:
    return {item.info.key: item.status for item in survey.findings}


def test_every_object_is_explained() -> None:
    """Live, forgotten, left behind, never committed, in progress, foreign; and nothing is missing."""
    store = MemoryStore()
    new_run(store)
    for step in (10, 20, 30):
        save_with(store, ManifestRef(step, 1))
    write_with(store, ManifestRef(15, 1))  # never committed, and overtaken
    assert begin(store).generation == 2
    write_with(store, ManifestRef(40, 2))  # a save in progress
    write_with(store, ManifestRef(35, 1))  # a zombie
    store.put(f"{run_prefix(RUN)}notes.txt", b"mine")
    assert forget(store, RUN, ManifestRef(10, 1), why="a test")
    survey = take_survey(store, RUN)
    status = _statuses(survey)
    assert set(status) == {item.key for item in store.list("").objects}
    for step, generation, wanted in (
        (10, 1, "forgotten"),
        (15, 1, "debris"),
        (30, 1, "live"),
        (40, 2, "live"),
        (35, 1, "debris"),
    ):
        ref = ManifestRef(step, generation)
        for prefix in (packs_prefix(RUN, ref), records_prefix(RUN, ref)):
            found = {status[item.key] for item in store.list(prefix).objects}
            assert found == {wanted}, (step, generation, prefix)
    assert status[f"{run_prefix(RUN)}notes.txt"] == "unknown"
    assert (survey.missing, survey.unreadable) == ([], [])


def test_a_pack_that_a_later_checkpoint_refers_to_stays() -> None:
    """Forgotten and swept, the frozen part of an old checkpoint is still there for the new one; it goes with the last that names it."""
    store = MemoryStore()
    new_run(store)
    first, second, third = (ManifestRef(step, 1) for step in (10, 20, 30))
    save_with(store, first)
    save_with(store, second, first)
    assert forget(store, RUN, first, why="a test")
    assert store.list(records_prefix(RUN, first)).objects
    assert sweep_all(store) > 0
    assert not store.list(records_prefix(RUN, first)).objects
    assert store.list(packs_prefix(RUN, first)).objects
    assert is_whole(store, second)
    save_with(store, third)
    assert forget(store, RUN, second, why="a test")
    sweep_all(store)
    assert not store.list(packs_prefix(RUN, first)).objects
    assert is_whole(store, third)


def test_what_is_young_stays() -> None:
    """By the store's clock, and all of a checkpoint or nothing."""
    store = MemoryStore()
    new_run(store)
    for step in (10, 20):
        save_with(store, ManifestRef(step, 1))
    forget(store, RUN, ManifestRef(10, 1), why="a test")
    plan = plan_sweep(take_survey(store, RUN), grace_s=3600.0)
    assert not plan.findings
    assert plan.young > 0
    assert plan_sweep(take_survey(store, RUN), grace_s=0.0).young == 0


@pytest.mark.parametrize("what", ["manifest", "record", "generation"])
def test_nothing_is_swept_while_a_live_document_cannot_be_read(what: str) -> None:
    """It may need anything."""
    store = MemoryStore()
    new_run(store)
    for step in (10, 20, 30):
        save_with(store, ManifestRef(step, 1))
    forget(store, RUN, ManifestRef(10, 1), why="a test")
    manifest = load_manifest(store, RUN, ManifestRef(20, 1))
    keys = {"manifest": manifest.key, "record": manifest.record_keys()[1], "generation": generation_key(RUN, 1)}
    key = keys[what]
    store.put(key, b"rot")
    survey = take_survey(store, RUN)
    assert survey.unreadable == [key]
    with pytest.raises(CorruptionError, match="cannot be read"):
        plan_sweep(survey, grace_s=0.0)
    if what == "generation":
        with pytest.raises(CorruptionError, match="cannot be read"):
            forget(store, RUN, ManifestRef(20, 1), why="a test")


@pytest.mark.parametrize("what", ["record", "pack"])
def test_missing_objects_are_named(what: str) -> None:
    """A record or pack of a live checkpoint that is gone, or of another size."""
    store = MemoryStore()
    new_run(store)
    ref = ManifestRef(10, 1)
    save_with(store, ref)
    record = records_of(store, ref)[1]
    key = record.key if what == "record" else record.pack_keys()[0]
    store.delete([key])
    assert take_survey(store, RUN).missing == [key]
    if what == "pack":
        store.put(key, b"short")
        assert take_survey(store, RUN).missing == [key]


class _DyingStore(MemoryStore):
    """Dies after so many deletions, in whatever call they come."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def delete(self, keys: Sequence[str]) -> None:
        """Delete one by one."""
        for key in keys:
            if self.left == 0:
                raise SimulatedCrash
            self.left -= 1
            super().delete([key])


def _crowded(store: MemoryStore) -> None:
    """A run with something to sweep of every kind, references across checkpoints, and a branch that was left."""
    new_run(store)
    save_with(store, ManifestRef(10, 1))
    save_with(store, ManifestRef(20, 1), ManifestRef(10, 1))
    write_with(store, ManifestRef(22, 1))
    save_with(store, ManifestRef(25, 1))
    forget(store, RUN, ManifestRef(10, 1), why="a test")
    begin(store)
    save_with(store, ManifestRef(30, 2))
    write_with(store, ManifestRef(28, 1))
    write_with(store, ManifestRef(35, 2))


def test_dying_after_each_deletion_harms_nothing() -> None:
    """For every n: what counts is whole, every object is still explained, and the next sweep finishes."""
    whole = _DyingStore(10**6)
    _crowded(whole)
    before = whole.left
    sweep_all(whole)
    total, wanted = before - whole.left, {item.key for item in whole.list("").objects}
    assert total > 8
    for number in range(total):
        store = _DyingStore(10**6)
        _crowded(store)
        store.left = number
        with pytest.raises(SimulatedCrash):
            sweep_all(store)
        store.left = 10**6
        for ref in read_history(store, RUN).line:
            assert is_whole(store, ref)
        survey = take_survey(store, RUN)
        assert not survey.missing
        assert not list(survey.of("unknown"))
        sweep_all(store)
        assert {item.key for item in store.list("").objects} == wanted, number


class _Racing(MemoryStore):
    """Does something of somebody else before its n-th call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.at = 0, -1
        self.busy = False

    def other(self) -> None:
        """What the somebody does."""

    def _tick(self) -> None:
        if self.busy:
            return
        self.calls += 1
        if self.calls == self.at:
            self.busy = True
            self.other()
            self.busy = False

    def list(self, prefix: str, *, after: str = "", limit: int | None = None):  # type: ignore[no-untyped-def]
        """Counted."""
        self._tick()
        return super().list(prefix, after=after, limit=limit)

    def get(
        self, key: str, *, offset: int = 0, length: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """Counted."""
        self._tick()
        return super().get(key, offset=offset, length=length, into=into)

    def delete(self, keys: Sequence[str]) -> None:
        """Counted."""
        self._tick()
        super().delete(keys)


@pytest.mark.parametrize("what", ["save", "refer", "half", "successor"])
def test_a_save_or_a_start_at_any_moment_of_a_sweep(what: str) -> None:
    """Before every single store call of survey and sweep another process saves, refers to old packs, or takes over: all of it stays whole."""

    def other(store: MemoryStore) -> list[ManifestRef]:
        new = ManifestRef(40, 2)
        if what == "save":
            save_with(store, new)
        elif what == "refer":
            save_with(store, new, ManifestRef(30, 2))
        elif what == "half":
            write_with(store, new)
        else:
            begin(store)
            new = ManifestRef(40, 3)
            save_with(store, new)
        return [new]

    number, calls = 1, 10**6
    while number <= calls:
        store = _Racing()
        _crowded(store)
        store.calls, store.at = 0, number
        made: list[ManifestRef] = []
        store.other = lambda store=store, made=made: made.extend(other(store))  # type: ignore[method-assign, misc]
        sweep_all(store)
        calls = store.calls
        store.at = -1
        if what == "half" and made:
            assert commit_manifest(store, RUN, made[0]) is not None, number
        for ref in read_history(store, RUN).line:
            assert is_whole(store, ref)
        for ref in made:
            assert ref in read_history(store, RUN).line
            assert is_whole(store, ref)
        number += 1
    assert calls > 15


def test_the_same_bytes_saved_again_lie_under_another_key() -> None:
    """A run that returns to a state it had, or trains steps again after a fall: never does a live save write what a sweep deletes."""
    store = MemoryStore()
    new_run(store)
    old, again = ManifestRef(10, 1), ManifestRef(20, 1)
    save_with(store, old)
    with ThreadPoolExecutor(1) as executor:
        for mine, theirs in zip(shards_with(again, old), shards_with(old, old), strict=True):
            write_shard(store, replace(mine, pieces=theirs.pieces), executor=executor)
    assert commit_manifest(store, RUN, again) is not None
    digests = [[pack.digest for pack in record.packs] for record in records_of(store, old)]
    assert digests == [[pack.digest for pack in record.packs] for record in records_of(store, again)]
    forget(store, RUN, old, why="a test")
    sweep_all(store)
    assert not store.list(packs_prefix(RUN, old)).objects
    verify_checkpoint(store, RUN, again)
    assert store.list(pack_key(RUN, again, digests[0][0])).objects
