"""A DataLoader whose samples, augmentation included, do not depend on workers, ranks or restarts.

Every sample is read with Python's, NumPy's and torch's generators seeded from (seed, epoch, sample id), in whatever process; the
training's own random streams are not touched. Workers leave a stop request to the rank: they neither die of a signal that was
meant for it, which would spoil the save that answers it, nor outlive it.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from torchrelay.data.dataset import MapDataset
from torchrelay.data.sampler import ElasticSampler, SampleKey

__all__ = ["SeededDataset", "elastic_loader", "sample_generator"]

_ORDER_ARGUMENTS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_LOOK_S = 0.25  # between a worker's looks at whether its parent lives


def elastic_loader(dataset: MapDataset, sampler: ElasticSampler, **dataloader_kwargs: Any) -> DataLoader[Any]:
    """Return a DataLoader of this rank's endless batches from ``sampler.start_step`` on.

    The other keyword arguments are DataLoader's own. Collating is seeded too (by the first sample), so random augmentation of
    whole batches repeats after a restart at the same number of ranks. Making and using the loader leaves the global
    generators alone. Not covered: generators that the dataset object keeps and advances itself, and random numbers drawn on a device.

    Raises ValueError for arguments that would set another order and for a dataset that is not the one the sampler knows.

    Example:
        >>> version = DatasetVersion("squares", "00" * 32, 4)
        >>> loader = elastic_loader([0, 1, 4, 9], ElasticSampler(version, global_batch=4, seed=0))
        >>> sorted(next(iter(loader)).tolist())
        [0, 1, 4, 9]
    """
    _check_arguments(dataset, sampler, dataloader_kwargs)
    collate = dataloader_kwargs.pop("collate_fn", None) or default_collate
    user_init = dataloader_kwargs.pop("worker_init_fn", None)
    generator = dataloader_kwargs.pop("generator", None) or torch.Generator().manual_seed(sampler.seed)
    if dataloader_kwargs.get("num_workers", 0) > 0:
        dataloader_kwargs.setdefault("persistent_workers", True)
    return _ElasticLoader(
        SeededDataset(dataset),
        batch_sampler=sampler,
        collate_fn=_SeededCollate(collate),
        worker_init_fn=_WorkerStart(user_init),
        generator=generator,
        **dataloader_kwargs,
    )


def sample_generator(key: SampleKey) -> torch.Generator:
    """Return a torch generator of its own for one sample: for a dataset that would rather not use the global ones."""
    return torch.Generator().manual_seed(_Seeds(key, "generator").torch)


class SeededDataset(Dataset[Any]):
    """Wraps a map-style dataset so that reading a ``SampleKey`` is a pure function of the key.

    The global generators of Python, NumPy and torch (CPU) are seeded before each read; outside of loader workers they get
    their former state back, also when the read raises.
    """

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: SampleKey) -> Any:
        with _global_rng_kept():
            return self._read(key)

    def __getitems__(self, keys: Sequence[SampleKey]) -> _Samples:
        """Read a batch; DataLoader prefers this. One sample at a time, whatever the wrapped dataset offers: each has a seed."""
        with _global_rng_kept():
            return _Samples([self._read(key) for key in keys], keys[0])

    def _read(self, key: SampleKey) -> Any:
        if not isinstance(key, SampleKey):
            raise TypeError(
                f"a SeededDataset is indexed by SampleKey, as ElasticSampler yields them, not by {type(key).__name__}"
            )
        _Seeds(key, "sample").plant()
        try:
            return self.dataset[key]
        except Exception as error:
            # The same error, so that it is judged by its class. A note survives the way out of a worker.
            error.add_note(f"while sample {int(key)} of epoch {key.epoch} was read")
            raise


class _Samples(list[Any]):
    """The samples of one batch, and the key of the first of them."""

    def __init__(self, samples: list[Any], first: SampleKey) -> None:
        super().__init__(samples)
        self.first = first


class _SeededCollate:
    """Calls the user's collate function with the generators seeded from the first sample of the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        assert isinstance(samples, _Samples)
        if self.collate is default_collate:  # draws nothing
            return default_collate(list(samples))
        with _global_rng_kept():
            _Seeds(samples.first, "collate").plant()
            return self.collate(list(samples))


class _Seeds:
    """Seeds for the three generators, from SHA-256 over (purpose, seed, epoch, sample id)."""

    def __init__(self, key: SampleKey, purpose: str) -> None:
        text = f"torchrelay/{purpose}/1\n{key.seed}\n{key.epoch}\n{int(key)}\n"
        digest = hashlib.sha256(text.encode()).digest()
        self.python = int.from_bytes(digest[:8], "little")
        self.numpy = int.from_bytes(digest[8:12], "little")
        self.torch = int.from_bytes(digest[16:24], "little") >> 1

    def plant(self) -> None:
        random.seed(self.python)
        np.random.seed(self.numpy)
        torch.default_generator.manual_seed(
            self.torch
        )  # not torch.manual_seed, which would reseed the devices' generators too


@contextlib.contextmanager
def _global_rng_kept() -> Iterator[None]:
    """Give the global generators their state back at the end; in a loader worker nobody else uses them."""
    if get_worker_info() is not None:
        yield
        return
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


class _ElasticLoader(DataLoader[Any]):
    """Starts its workers with the stop signals held back, so that there is no moment in which one could kill them."""

    def __iter__(self) -> Any:
        former = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)


class _WorkerStart:
    """Prepares a worker: deaf to SIGINT, and to SIGTERM unless its own loader sends it; gone when its parent is."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self.user_init = user_init

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        threading.Thread(target=_obey_parent_only, args=(parent.pid,), name="obey-parent", daemon=True).start()
        if self.user_init is not None:
            self.user_init(worker)


def _obey_parent_only(parent: int) -> None:
    """End this process when the parent sends SIGTERM (DataLoader's last resort against a stuck worker) or is gone.

    A worker that outlived its rank would keep the rank's sockets and pipes open, and others would believe it alive. The
    parent-death signal of Linux is not used: it fires when the *thread* that started the worker ends.
    """
    # The parent; or the fork server of that start method, which dies with it; or whoever took over a worker whose parent was
    # killed before this line, which is why the parent itself is looked at too.
    born_of = os.getppid()
    while os.getppid() == born_of and (born_of == parent or _exists(parent)):
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_S)
        if received is not None and received.si_pid == parent:
            os._exit(0)
    os._exit(1)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _check_arguments(dataset: MapDataset, sampler: ElasticSampler, given: dict[str, Any]) -> None:
    clash = [name for name in _ORDER_ARGUMENTS if name in given]
    if clash:
        raise ValueError(
            f"{', '.join(clash)}: the ElasticSampler decides which samples make a batch; drop the argument"
        )
    if given.get("in_order", True) is not True:
        raise ValueError("in_order=False would let the order of batches depend on the speed of workers")
    if isinstance(dataset, IterableDataset):
        raise ValueError("an IterableDataset has no samples by index; elastic loading needs a map-style dataset")
    if len(dataset) != sampler.version.num_samples:
        raise ValueError(
            f"the dataset has {len(dataset)} samples, but its version {sampler.version.name!r} says {sampler.version.num_samples}"
        )
