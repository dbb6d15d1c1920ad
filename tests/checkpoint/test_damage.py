"""Damage of every kind at every place: found, named, stepped over, never loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpointing import RUN, begin, contents, expected, latest, new_run, save
from tests.launching import Launch, final_state, renamed, tiny_spec, train_to_the_end
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef, damage_key
from torchrelay.checkpoint.reader import clear_damage, list_checkpoints, load_manifest, mark_damaged, verify_checkpoint
from torchrelay.checkpoint.sealed import seal
from torchrelay.errors import ConfigError, CorruptionError
from torchrelay.relay import read_status
from torchrelay.store import open_store
from torchrelay.store.files import FileStore
from torchrelay.store.memory import MemoryStore

_NEWEST, _BEFORE = ManifestRef(30, 1), ManifestRef(20, 1)


@pytest.fixture
def store() -> MemoryStore:
    """A run with three checkpoints."""
    store = MemoryStore()
    new_run(store)
    for step in (10, 20, 30):
        save(store, ManifestRef(step, 1))
    return store


def _own_keys(store: MemoryStore, kind: str) -> list[str]:
    """Keys of the newest checkpoint's objects of one kind."""
    manifest = load_manifest(store, RUN, _NEWEST)
    if kind == "manifest":
        return [manifest.key]
    if kind == "record":
        return manifest.record_keys()
    from concurrent.futures import ThreadPoolExecutor

    from torchrelay.checkpoint.reader import load_records

    with ThreadPoolExecutor(1) as executor:
        records = load_records(store, manifest, executor=executor)
    return [key for record in records for key in record.pack_keys()]


@pytest.mark.parametrize("kind", ["manifest", "record", "pack"])
def test_one_flipped_bit_anywhere_is_found(store: MemoryStore, kind: str) -> None:
    """Each byte of each object of the checkpoint, one bit of it: `verify` refuses it, and no load gives wrong values."""
    for key in _own_keys(store, kind):
        good = bytes(store.get(key))
        for place in range(len(good)):
            bad = bytearray(good)
            bad[place] ^= 1 << (place % 8)
            store.put(key, bytes(bad))
            with pytest.raises(CorruptionError):
                verify_checkpoint(store, RUN, _NEWEST)
            try:
                assert contents(store, _NEWEST) == expected(_NEWEST), (key, place)  # a bit of a pack's header: not used
            except CorruptionError:
                pass
        store.put(key, good)
    assert contents(store, _NEWEST) == expected(_NEWEST)
    verify_checkpoint(store, RUN, _NEWEST)


@pytest.mark.parametrize("kind", ["manifest", "record", "pack"])
def test_what_is_cut_short_or_gone_is_found(store: MemoryStore, kind: str) -> None:
    """Every length of a truncated object, and its absence; a longer one too."""
    for key in _own_keys(store, kind):
        good = bytes(store.get(key))
        # A line feed at the end of a document is not part of what it says.
        shortest_whole = len(good) - good.endswith(b"\n")
        for spoilt in [good[:length] for length in range(0, shortest_whole, 7)] + [good + b"x"]:
            store.put(key, spoilt)
            with pytest.raises(CorruptionError):
                verify_checkpoint(store, RUN, _NEWEST)
        store.delete([key])
        with pytest.raises(CorruptionError):
            verify_checkpoint(store, RUN, _NEWEST)
        store.put(key, good)


def test_a_start_steps_back_over_damaged_manifests_and_says_so(store: MemoryStore) -> None:
    """Two of three are unreadable: the generation begins at the third, both are marked, nothing is deleted."""
    for ref in (_NEWEST, _BEFORE):
        store.put(ref.key(RUN), b"not what it was")
    claim = begin(store)
    assert claim.begin == ManifestRef(10, 1)
    assert [word for word in claim.notices if "damaged and was stepped over" in word] == list(claim.notices)
    assert len(claim.notices) == 2
    assert {ref for ref in (_NEWEST, _BEFORE) if store.list(damage_key(RUN, ref)).objects} == {_NEWEST, _BEFORE}
    assert store.list(_NEWEST.key(RUN)).objects
    assert [row.damaged for row in list_checkpoints(store, RUN)] == [False, True, True]


def test_all_checkpoints_damaged_means_from_scratch_with_notices(store: MemoryStore) -> None:
    """There is nothing left to begin at: that is said three times, not an endless loop."""
    for step in (10, 20, 30):
        store.put(ManifestRef(step, 1).key(RUN), b"")
    claim = begin(store)
    assert claim.begin is None
    assert len(claim.notices) == 3


def test_a_mark_can_be_taken_away_again(store: MemoryStore) -> None:
    """It was the reading that failed, not the checkpoint."""
    mark_damaged(store, RUN, _NEWEST, "a bad cable")
    assert latest(store) == _BEFORE
    assert [(row.ref, row.damaged) for row in list_checkpoints(store, RUN)][-1] == (_NEWEST, True)
    clear_damage(store, RUN, _NEWEST)
    assert latest(store) == _NEWEST


@pytest.mark.parametrize("what", ["manifest", "generation", "run"])
def test_a_newer_format_is_an_error_and_not_damage(store: MemoryStore, what: str) -> None:
    """An old program must not step back over what a newer one wrote; the hint says what to do."""
    history = read_history(store, RUN)
    assert history.newest is not None
    keys = {"manifest": _NEWEST.key(RUN), "generation": history.newest.key, "run": f"index/{RUN}.json"}
    name, body = f"torchrelay/{what}/2", b'{"all":"new"}'
    import hashlib

    digest = hashlib.sha256(name.encode() + b"\n" + body).hexdigest()
    store.put(keys[what], json.dumps({"format": name, "sha256": digest}).encode() + b"\n" + body + b"\n")
    with pytest.raises(ConfigError, match="format version 2") as caught:
        new_run(store)
    assert "upgrade" in caught.value.hint
    assert not store.list(f"runs/{RUN}/verdicts/").objects


def test_foreign_objects_do_no_harm(store: MemoryStore) -> None:
    """Somebody else's files in the bucket, of names that look almost like ours."""
    for key in (
        "readme.txt",
        "manifests/x.json",
        "manifests/000000000099-g000001.json.tmp",
        "generations/9.json",
        "packs/zz",
    ):
        store.put(f"runs/{RUN}/{key}", b"hello")
    store.put(f"runs/{RUN}/records/000000000031-g000001/note.txt", seal("record", {}))
    claim = begin(store)
    assert (claim.generation, claim.begin) == (2, _NEWEST)


def test_bit_rot_in_a_pack_costs_one_generation_and_no_bit(tmp_path: Path) -> None:
    """With real ranks: the newest checkpoint's pack is damaged on the disk; the run steps back, replays, and ends as if nothing had been."""
    url = f"file://{tmp_path / 'store'}"
    spec = tiny_spec(
        url, "rot", ranks=2, steps=30, fail_at={"rank": 0, "step": 25, "how": "kill", "flag": str(tmp_path / "f")}
    )
    assert Launch(spec).outcome().kind == "killed"
    store = FileStore(tmp_path / "store")
    newest = read_history(store, "rot").latest
    assert newest is not None
    files = sorted((tmp_path / "store/runs/rot/packs").glob("*/*"), key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(files[-1].read_bytes())
    data[-3] ^= 4
    files[-1].write_bytes(data)
    outcomes = train_to_the_end(spec)
    assert [outcome.kind for outcome in outcomes] == ["corruption", "completed"]
    assert outcomes[0].begin_step == newest.step
    assert outcomes[1].begin_step < newest.step
    assert read_status(open_store(url), "rot").finished
    train_to_the_end(renamed(spec, "twin"))
    assert final_state(url, "rot") == final_state(url, "twin")
