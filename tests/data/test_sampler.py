"""The order of samples: the same for any number of ranks, any restart and any prefetching."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.data.dataset import DatasetVersion
from torchrelay.data.loader import elastic_loader
from torchrelay.data.sampler import ElasticSampler, SampleKey
from torchrelay.errors import StateMismatchError

_VERSION = DatasetVersion("t", "ab" * 32, 37)


def _sampler(
    samples: int = 37, batch: int = 10, *, rank: int = 0, world_size: int = 1, seed: int = 3
) -> ElasticSampler:
    version = replace(_VERSION, num_samples=samples)
    return ElasticSampler(version, global_batch=batch, seed=seed, rank=rank, world_size=world_size)


def _take(sampler: ElasticSampler, steps: int) -> list[list[SampleKey]]:
    return list(itertools.islice(iter(sampler), steps))


@given(st.integers(1, 50), st.integers(1, 24), st.integers(1, 24), st.integers(0, 9))
def test_the_ranks_together_are_one_rank(samples: int, batch: int, world_size: int, start: int) -> None:
    """Uneven divisions too: the concatenated slices of each step are the step, with the same epochs; sizes differ by at most one."""
    world_size = min(world_size, batch)
    alone = _sampler(samples, batch)
    state = alone.state_dict_at(start)
    ranks = [_sampler(samples, batch, rank=rank, world_size=world_size) for rank in range(world_size)]
    for sampler in (alone, *ranks):
        sampler.load_state_dict(state)
    parts = [_take(rank, 3) for rank in ranks]
    for step, whole in enumerate(_take(alone, 3)):
        joined = [key for part in parts for key in part[step]]
        assert joined == whole == alone.global_ids(start + step).tolist()
        assert [key.epoch for key in joined] == [key.epoch for key in whole]
        sizes = [len(part[step]) for part in parts]
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 60), st.integers(1, 25), st.integers(1, 3))
def test_each_epoch_shows_each_sample_once(samples: int, batch: int, epochs: int) -> None:
    """Also when the batch does not divide the epoch, or is larger than it: a batch may straddle epochs."""
    steps = -(-samples * epochs // batch)
    keys = [key for drawn in _take(_sampler(samples, batch), steps) for key in drawn][: samples * epochs]
    for epoch in range(epochs):
        part = keys[epoch * samples : (epoch + 1) * samples]
        assert sorted(part) == list(range(samples))
        assert {key.epoch for key in part} == {epoch}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """Otherwise a model would see its data in the same order again and again."""
    orders = [tuple(_sampler(37, 37).global_ids(epoch).tolist()) for epoch in range(5)]
    orders += [tuple(_sampler(37, 37, seed=seed).global_ids(0).tolist()) for seed in range(4, 9)]
    assert len(set(orders)) == len(orders)


@given(st.lists(st.tuples(st.integers(1, 10), st.integers(0, 5)), min_size=1, max_size=6))
def test_any_number_of_ranks_takes_over(relay: list[tuple[int, int]]) -> None:
    """A chain of restarts with other world sizes yields the one order, and ends with the ledger of the run that never stopped."""
    expected = _sampler()
    state = expected.state_dict_at(0)
    done = 0
    for world_size, steps in relay:
        ranks = [_sampler(rank=rank, world_size=world_size) for rank in range(world_size)]
        for sampler in ranks:
            sampler.load_state_dict(state)
        drawn = [
            _take(sampler, steps + 2) for sampler in ranks
        ]  # fetched ahead of the optimizer, and lost at the restart
        for step in range(steps):
            assert [key for part in drawn for key in part[step]] == expected.global_ids(done + step).tolist()
        done += steps
        states = [sampler.state_dict_at(done) for sampler in ranks]
        assert all(item == states[0] for item in states)
        state = states[0]
    assert state == _sampler().state_dict_at(done)
    assert state["samples_consumed"] == 10 * done


def test_the_ledger_tells_orders_apart() -> None:
    """Another seed, batch, dataset or step: another hash."""
    base = _sampler().state_dict_at(4)["ledger"]
    others = [
        _sampler(seed=4).state_dict_at(4),
        _sampler(batch=11).state_dict_at(4),
        _sampler(samples=38).state_dict_at(4),
        _sampler().state_dict_at(5),
    ]
    assert len({base, *(other["ledger"] for other in others)}) == 5


def test_the_order_and_the_ledger_never_change() -> None:
    """Both are part of every stored run. The ledger is also computed here as the format says: a SHA-256 chain over the ids."""
    sampler = _sampler()
    assert sampler.global_ids(3).tolist() == [23, 29, 6, 28, 27, 14, 13, 22, 24, 8]
    ledger = sampler.state_dict_at(5)["ledger"]
    assert ledger == "c70abae218a02bac58115202783542eae8dde29aa47f08253eec669f9bd7aa3e"
    link = bytes.fromhex(_sampler().state_dict_at(0)["ledger"])
    for step in range(5):
        link = hashlib.sha256(link + b"".join(struct.pack("<q", key) for key in _sampler().global_ids(step))).digest()
    assert link.hex() == ledger


def test_workers_that_fetch_ahead_do_not_move_the_position() -> None:
    """Real workers, eight batches ahead: the state is that of the steps taken, and what was only fetched is drawn again."""
    sampler = _sampler()
    loader = elastic_loader(range(37), sampler, num_workers=2, prefetch_factor=4)
    taken = [batch.tolist() for batch in itertools.islice(loader, 5)]
    assert taken == [sampler.global_ids(step).tolist() for step in range(5)]
    state = sampler.state_dict_at(5)
    assert state == _sampler().state_dict_at(5)
    resumed = _sampler()
    resumed.load_state_dict(state)
    (following,) = itertools.islice(elastic_loader(range(37), resumed), 1)
    assert following.tolist() == sampler.global_ids(5).tolist()


def test_links_that_were_dropped_are_computed_again() -> None:
    """Drawn further ahead than the ledger remembers: the same links, in bounded memory."""
    sampler = _sampler(7, 2)
    _take(sampler, 4200)
    for step in (3, 90, 4150):
        assert sampler.state_dict_at(step) == _sampler(7, 2).state_dict_at(step)


def test_asking_for_an_earlier_step_is_right_too() -> None:
    """A checkpoint of a step that lies behind the position: slower, and the same."""
    sampler = _sampler()
    _take(sampler, 30)
    late = sampler.state_dict_at(20)
    assert sampler.state_dict_at(7) == _sampler().state_dict_at(7)
    assert sampler.state_dict_at(20) == late == _sampler().state_dict_at(20)


def test_iterating_twice_does_not_count_twice() -> None:
    """The position belongs to the optimizer's step, not to what was drawn."""
    sampler = _sampler()
    _take(sampler, 5)
    _take(sampler, 9)
    assert sampler.state_dict_at(5) == _sampler().state_dict_at(5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 9}, "seed is 3 here, 9 in the checkpoint"),
        ({"global_batch": 12}, "global_batch is 10 here, 12"),
        ({"dataset": {"name": "t", "digest": "cd" * 32, "num_samples": 37}}, "dataset digest"),
        ({"dataset": {"name": "t", "digest": "ab" * 32, "num_samples": 36}}, "number of samples"),
        ({"samples_consumed": 41}, "damaged"),
        ({"samples_consumed": -10}, "damaged"),
        ({"samples_consumed": 40.7}, "not the state"),
        ({"samples_consumed": float("inf")}, "not the state"),
        ({"ledger": "ab"}, "damaged"),
        ({"ledger": "zz"}, "not the state"),
        ({"dataset": None}, "not the state"),
    ],
)
def test_another_order_is_refused_and_named(change: dict[str, Any], words: str) -> None:
    """Nothing is taken over from a state that does not fit."""
    sampler = _sampler()
    state = {**sampler.state_dict_at(4), **change}
    with pytest.raises(StateMismatchError, match=words):
        sampler.load_state_dict(state)
    assert sampler.start_step == 0


@pytest.mark.parametrize("state", [{}, {"dataset": {}}, None, []])
def test_what_is_no_state_at_all_is_refused(state: Any) -> None:
    """Something of another object, or nothing."""
    with pytest.raises(StateMismatchError, match="not the state"):
        _sampler().load_state_dict(state)


def test_the_name_of_a_dataset_may_change() -> None:
    """Its digest is what counts."""
    sampler = _sampler()
    state = sampler.state_dict_at(4)
    sampler.load_state_dict({**state, "dataset": {**state["dataset"], "name": "moved"}})
    assert sampler.start_step == 4


def test_a_trillion_samples_and_a_far_step_cost_nothing() -> None:
    """Any step is reached at once, in constant memory."""
    tracemalloc.start()
    sampler = ElasticSampler(DatasetVersion("big", "ab" * 32, 10**12), global_batch=1024, seed=0)
    assert len(sampler.global_ids(10**9)) == 1024
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "arguments",
    [{"batch": 0}, {"seed": -1}, {"world_size": 11}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}],
)
def test_impossible_arguments_are_refused(arguments: dict[str, int]) -> None:
    """A rank without samples, a rank that is not there, a batch of nothing."""
    with pytest.raises(ValueError, match=r"must|without"):
        _sampler(**arguments)


def test_keys_travel_between_processes() -> None:
    """Loader workers get them by pickle."""
    key = pickle.loads(pickle.dumps(SampleKey(7, 2, 5)))  # noqa: S301 - our own bytes
    assert (int(key), key.epoch, key.seed) == (7, 2, 5)
