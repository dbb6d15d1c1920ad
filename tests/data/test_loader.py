"""Loading: augmentation is a function of the sample, workers are obedient, and the training's own random streams stay untouched."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.waiting import wait_until
from torchrelay.data.dataset import DatasetVersion
from torchrelay.data.loader import SeededDataset, elastic_loader, sample_generator
from torchrelay.data.sampler import ElasticSampler, SampleKey

_SIZE = 24


class Noisy:
    """Each sample draws from all three generators."""

    def __len__(self) -> int:
        return _SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(
            [index, random.random(), float(np.random.rand()), torch.rand(1).item()], dtype=torch.float64
        )


class Broken(Noisy):
    """One sample cannot be read, and the error does not say which."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise OSError("bad sector")
        return super().__getitem__(index)


class Named(Noisy):
    """Says who reads it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([os.getpid()])


def _sampler(*, rank: int = 0, world_size: int = 1) -> ElasticSampler:
    version = DatasetVersion("noisy", "ab" * 32, _SIZE)
    return ElasticSampler(version, global_batch=8, seed=3, rank=rank, world_size=world_size)


def _shift(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + random.random()


def _batches(loader: DataLoader[Any], count: int) -> torch.Tensor:
    return torch.cat(list(islice(iter(loader), count)))


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """Seven batches (two epochs and more) read by the main process."""
    return _batches(elastic_loader(Noisy(), _sampler()), 7)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(alone: torch.Tensor, workers: int) -> None:
    """Bit for bit the batches that no worker would read, augmentation included."""
    assert torch.equal(_batches(elastic_loader(Noisy(), _sampler(), num_workers=workers), 7), alone)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_change_nothing(alone: torch.Tensor, world_size: int) -> None:
    """The same samples with the same augmentation, divided."""
    loaders = [elastic_loader(Noisy(), _sampler(rank=rank, world_size=world_size)) for rank in range(world_size)]
    joined = torch.cat([torch.cat(parts) for parts in islice(zip(*loaders, strict=True), 7)])
    assert torch.equal(joined, alone)


def test_a_restart_changes_nothing(alone: torch.Tensor) -> None:
    """The batches from step 4 on, by a loader that never saw those before."""
    sampler = _sampler()
    sampler.load_state_dict(_sampler().state_dict_at(4))
    assert torch.equal(_batches(elastic_loader(Noisy(), sampler, num_workers=1), 3), alone[4 * 8 :])


def test_each_epoch_draws_anew(alone: torch.Tensor) -> None:
    """The same sample twice: the same index, other noise."""
    rows = alone[alone[:, 0] == 5]
    assert len(rows) >= 2
    assert rows[0, 1:].tolist() != rows[1, 1:].tolist()
    assert len({tuple(row) for row in alone[:, 1:].tolist()}) == len(alone)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_trainings_own_random_streams_are_untouched(workers: int) -> None:
    """Making a loader, making an iterator, reading and collating leave the three global generators as they were; also when reading raises."""

    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()  # type: ignore[index]

    before = state()
    _batches(elastic_loader(Noisy(), _sampler(), num_workers=workers, collate_fn=_shift), 3)
    assert "bad sector" in _failure(workers)
    assert state() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_names_the_sample(workers: int) -> None:
    """The dataset's own error, of its own class, with the sample and the epoch it was asked for."""
    text = _failure(workers)
    assert text.startswith("OSError: ")
    assert "bad sector" in text
    assert "while sample 5 of epoch 0 was read" in text


def _failure(workers: int) -> str:
    """Read until it fails. The traceback is cut: it would keep the loader in a cycle, whose workers end by a timeout when it is collected."""
    try:
        _batches(elastic_loader(Broken(), _sampler(), num_workers=workers), 6)
    except OSError as error:
        error.__traceback__ = None
        return "".join(traceback.format_exception(error))
    return "nothing"


@pytest.mark.parametrize("workers", [0, 2])
def test_random_collating_repeats(workers: int) -> None:
    """It is seeded by the first sample of the batch."""
    one = _batches(elastic_loader(Noisy(), _sampler(), collate_fn=_shift), 3)
    assert torch.equal(_batches(elastic_loader(Noisy(), _sampler(), num_workers=workers, collate_fn=_shift), 3), one)


@pytest.fixture
def worker() -> tuple[int, Iterator[torch.Tensor]]:
    """The process id of a living worker, and the iterator it works for."""
    batches = iter(elastic_loader(Named(), _sampler(), num_workers=1))
    return int(next(batches)[0, 0]), batches


def test_a_stop_request_is_the_ranks_business(worker: tuple[int, Iterator[torch.Tensor]]) -> None:
    """SIGTERM and SIGINT go to a whole group; a worker that died of one would spoil the save that answers it."""
    pid, batches = worker
    assert pid != os.getpid()
    for number in (signal.SIGTERM, signal.SIGINT):
        sender = f"import os; os.kill({pid}, {int(number)})"  # from another process, as the launcher would
        subprocess.run([sys.executable, "-c", sender], check=True)
    assert all(int(next(batches)[0, 0]) == pid for _ in range(6))


def test_workers_end_with_a_killed_rank(tmp_path: Path) -> None:
    """SIGKILL of the parent: no worker keeps its sockets open."""
    program = tmp_path / "rank.py"
    program.write_text(
        "from tests.data.test_loader import Named, _sampler\n"
        "from torchrelay.data.loader import elastic_loader\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    batches = iter(elastic_loader(Named(), _sampler(), num_workers=2))\n"
        "    print(int(next(batches)[0, 0]), int(next(batches)[0, 0]), flush=True)\n"
        "    time.sleep(60)\n"
    )
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environ) as rank:
        assert rank.stdout is not None
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(set(pids)) == 2
        rank.kill()
    wait_until(lambda: all(_has_ended(pid) for pid in pids), what="the end of the workers")


def _has_ended(pid: int) -> bool:
    """Whether it runs no more; the process that takes over orphans may leave a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def test_a_worker_whose_parent_was_killed_before_it_looked_ends_too() -> None:
    """An orphan from the first moment has another parent than the one it was made by; it must not take that one for its own."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait(30)
    code = f"from torchrelay.data.loader import _obey_parent_only; _obey_parent_only({dead.pid})"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 1


def test_the_loaders_own_stop_request_is_obeyed(worker: tuple[int, Iterator[torch.Tensor]]) -> None:
    """SIGTERM of the rank itself is DataLoader's last resort against a stuck worker."""
    pid, _batches_of_it = worker
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: _has_ended(pid), what="the end of the worker")


class _Seen(Noisy):
    """Shows how the generators were seeded, by what their makers promise to keep from version to version."""

    def __getitem__(self, index: int) -> Any:
        return int(index), random.random(), float(np.random.rand()), torch.initial_seed()


def test_seeds_never_change() -> None:
    """Augmentation after a restart by a later version is what it would have been."""
    assert SeededDataset(_Seen())[SampleKey(7, 2, 3)] == (7, 0.4714536530884129, 0.833812682026904, 5273151289253242988)
    assert sample_generator(SampleKey(7, 2, 3)).initial_seed() == 6601087595766519532
    collated = next(iter(elastic_loader(_Seen(), _sampler(), collate_fn=lambda _: _Seen()[0])))
    assert collated == (0, 0.42445009952412205, 0.7059891001425361, 2969109530246866976)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_every_way_of_starting_workers_gives_the_same(alone: torch.Tensor, method: str) -> None:
    """Also where a worker is no child of the rank: it must not take itself for an orphan."""
    loader = elastic_loader(Noisy(), _sampler(), num_workers=1, multiprocessing_context=method)
    assert torch.equal(_batches(loader, 7), alone)


def test_a_generator_of_its_own_for_each_sample() -> None:
    """For datasets that would rather not use the global ones: the same key, the same numbers."""
    key = SampleKey(3, 1, 9)
    assert torch.equal(torch.rand(4, generator=sample_generator(key)), torch.rand(4, generator=sample_generator(key)))
    for other in (SampleKey(4, 1, 9), SampleKey(3, 2, 9), SampleKey(3, 1, 8)):
        drawn = torch.rand(4, generator=sample_generator(other))
        assert not torch.equal(drawn, torch.rand(4, generator=sample_generator(key)))


class _Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return _SIZE

    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("dataset", "arguments", "words"),
    [
        (Noisy(), {"shuffle": True}, "shuffle"),
        (Noisy(), {"batch_size": 4}, "batch_size"),
        (Noisy(), {"in_order": False}, "in_order"),
        (_Stream(), {}, "map-style"),
        (TensorDataset(torch.zeros(3)), {}, "3 samples"),
    ],
)
def test_what_would_make_another_order_is_refused(dataset: Any, arguments: dict[str, Any], words: str) -> None:
    """The sampler alone decides."""
    with pytest.raises(ValueError, match=words):
        elastic_loader(dataset, _sampler(), **arguments)


def test_a_plain_index_is_refused() -> None:
    """Without its epoch a sample has no seed."""
    with pytest.raises(TypeError, match="SampleKey"):
        SeededDataset(Noisy())[3]  # type: ignore[index]
