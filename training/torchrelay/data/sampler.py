"""The order of samples: the same for any number of ranks, and after any restart.

The sample at global index i is a pure function of (dataset version, seed, i). Step s consumes the indices [s*B, (s+1)*B) of a
fixed global batch B, and each rank takes its contiguous slice of it; so the whole position is one integer. A hash chain over
the consumed ids proves that two runs, or two halves of one, saw the same samples. Nothing here counts what was merely fetched ahead.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from torchrelay.data.dataset import DatasetVersion
from torchrelay.data.permutation import KeyedPermutation
from torchrelay.errors import StateMismatchError

__all__ = ["ElasticSampler", "SampleKey"]

_LEDGER_WINDOW = (
    4096  # links kept for batches drawn ahead; far more than loaders prefetch, and a lost link is only recomputed
)


class SampleKey(int):
    """The id of a sample, to be used as an index, that also knows its ``epoch`` and the run's data ``seed``."""

    epoch: int
    seed: int

    def __new__(cls, sample: int, epoch: int, seed: int) -> Self:
        key = super().__new__(cls, sample)
        key.epoch, key.seed = epoch, seed
        return key

    def __reduce__(self) -> tuple[type[SampleKey], tuple[int, int, int]]:
        return type(self), (int(self), self.epoch, self.seed)

    def __repr__(self) -> str:
        return f"SampleKey({int(self)}, epoch={self.epoch}, seed={self.seed})"


class ElasticSampler:
    """An endless batch sampler for ``torch.utils.data.DataLoader``, one list of ``SampleKey`` per step and rank.

    Each epoch shows every sample exactly once, in an order of its own; a batch may straddle epochs, and may be larger than the
    dataset. The slices of the ranks differ in size by at most one. Constant memory, and any step is reached at once.

    Args:
        version: names the data by content and says how many samples there are.
        global_batch: samples per optimizer step over all ranks.
        seed: of the order, between 0 and 2**63 - 1.
        rank, world_size: whose slice to yield; they change nothing else, and may differ after a restart.

    Example:
        >>> version = DatasetVersion("letters", "00" * 32, 26)
        >>> ranks = [ElasticSampler(version, global_batch=4, seed=1, rank=rank, world_size=2) for rank in range(2)]
        >>> [*next(iter(ranks[0])), *next(iter(ranks[1]))] == ranks[0].global_ids(0).tolist()
        True
    """

    def __init__(
        self, version: DatasetVersion, *, global_batch: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        _require(global_batch >= 1, f"global_batch must be at least 1, not {global_batch}")
        _require(0 <= seed < 2**63, f"seed must be between 0 and 2**63 - 1, not {seed}")
        _require(world_size >= 1, f"world_size must be at least 1, not {world_size}")
        _require(0 <= rank < world_size, f"rank must lie in [0, {world_size}), not {rank}")
        _require(
            world_size <= global_batch,
            f"a global batch of {global_batch} leaves some of {world_size} ranks without a sample",
        )
        self.version, self.global_batch, self.seed = version, global_batch, seed
        self.rank, self.world_size = rank, world_size
        self._first, self._last = rank * global_batch // world_size, (rank + 1) * global_batch // world_size
        self._start_step = 0
        self._shuffle: tuple[int, KeyedPermutation] | None = None
        self._ledger = _Ledger(self._genesis(), self.global_ids)

    @property
    def start_step(self) -> int:
        """The step whose batch a new iterator yields first."""
        return self._start_step

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield this rank's slice of each batch, from ``start_step`` on, without end."""
        for step in itertools.count(self._start_step):
            ids = self.global_ids(step)
            self._ledger.append(step, ids)
            index = step * self.global_batch + self._first
            mine = ids[self._first : self._last].tolist()
            yield [
                SampleKey(sample, (index + offset) // self.version.num_samples, self.seed)
                for offset, sample in enumerate(mine)
            ]

    def global_ids(self, step: int) -> NDArray[np.int64]:
        """Return the sample ids of step ``step`` (0-based) over all ranks, in order: int64, shape (global_batch,)."""
        _require(step >= 0, f"step must not be negative, not {step}")
        index, end = step * self.global_batch, (step + 1) * self.global_batch
        pieces = []
        while index < end:
            epoch, offset = divmod(index, self.version.num_samples)
            count = min(end - index, self.version.num_samples - offset)
            pieces.append(self._permutation(epoch)(np.arange(offset, offset + count)))
            index += count
        return np.concatenate(pieces)

    def state_dict_at(self, step: int) -> dict[str, Any]:
        """Return the state after ``step`` steps have consumed their batches, however many have been fetched.

        Quick for steps at or after the one last asked for; an earlier step costs a walk from the first one.
        """
        _require(step >= 0, f"step must not be negative, not {step}")
        consumed = step * self.global_batch
        return {
            "samples_consumed": consumed,
            "epoch": consumed // self.version.num_samples,
            "global_batch": self.global_batch,
            "seed": self.seed,
            "dataset": {
                "name": self.version.name,
                "digest": self.version.digest,
                "num_samples": self.version.num_samples,
            },
            "ledger": self._ledger.at(step).hex(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which another rank or another number of ranks may have written.

        Iterators made from now on begin there. Raises StateMismatchError naming what differs: another dataset, seed or
        global batch would be another order of samples.
        """
        step, ledger = self._check(state)
        self._start_step = step
        self._ledger.restart(step, ledger)

    def _check(self, state: Mapping[str, Any]) -> tuple[int, bytes]:
        try:
            data, consumed = state["dataset"], state["samples_consumed"]
            if type(consumed) is not int:  # int() would cut off a fraction in silence, and go on at another sample
                raise TypeError(f"samples_consumed is {consumed!r}")
            found = {
                "dataset digest": (data["digest"], self.version.digest),
                "number of samples": (data["num_samples"], self.version.num_samples),
                "seed": (state["seed"], self.seed),
                "global_batch": (state["global_batch"], self.global_batch),
            }
            ledger = bytes.fromhex(state["ledger"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(f"this is not the state of an ElasticSampler: {error!r}") from error
        differences = [
            f"{name} is {here!r} here, {there!r} in the checkpoint"
            for name, (there, here) in found.items()
            if there != here
        ]
        if differences:
            hint = (
                "train on the data the run began with, or start a new run_id"
                if data["digest"] != self.version.digest
                else ""
            )
            raise StateMismatchError(f"the data differ: {'; '.join(differences)}", hint=hint)
        step, rest = divmod(consumed, self.global_batch)
        if consumed < 0 or rest or len(ledger) != hashlib.sha256().digest_size:
            raise StateMismatchError(
                f"the data position is damaged: {consumed} samples consumed, ledger {state['ledger']!r}"
            )
        return step, ledger

    def _permutation(self, epoch: int) -> KeyedPermutation:
        if self._shuffle is None or self._shuffle[0] != epoch:
            text = f"torchrelay/permutation/1\n{self.version.digest}\n{self.seed}\n{epoch}\n"
            key = hashlib.sha256(text.encode()).digest()
            self._shuffle = (epoch, KeyedPermutation(self.version.num_samples, key))
        return self._shuffle[1]

    def _genesis(self) -> bytes:
        version = self.version
        text = f"torchrelay/ledger/1\n{version.digest}\n{version.num_samples}\n{self.seed}\n{self.global_batch}\n"
        return hashlib.sha256(text.encode()).digest()


class _Ledger:
    """The hash chain over the global batches: link(s + 1) = SHA-256(link(s), ids of step s as little-endian int64).

    Links of batches drawn ahead of the optimizer are kept, a bounded number of them; any other link is recomputed.
    """

    def __init__(self, genesis: bytes, ids: Callable[[int], NDArray[np.int64]]) -> None:
        self._genesis, self._ids = genesis, ids
        self.restart(0, genesis)

    def restart(self, step: int, link: bytes) -> None:
        self._anchor = (step, link)
        self._ahead: OrderedDict[int, bytes] = OrderedDict()

    def append(self, step: int, ids: NDArray[np.int64]) -> None:
        """Note that the batch of ``step`` was drawn. A second iterator over the same steps adds nothing."""
        newest, link = next(reversed(self._ahead.items())) if self._ahead else self._anchor
        if step == newest:
            self._ahead[step + 1] = _link(link, ids)
            if len(self._ahead) > _LEDGER_WINDOW:
                self._ahead.popitem(last=False)

    def at(self, step: int) -> bytes:
        """Return the link after ``step`` steps, and forget the links before it."""
        base, link = max(
            (item for item in (*self._ahead.items(), self._anchor, (0, self._genesis)) if item[0] <= step),
            key=lambda item: item[0],
        )
        for earlier in range(base, step):
            link = _link(link, self._ids(earlier))
        if step >= self._anchor[0]:
            self._anchor = (step, link)
            while self._ahead and next(iter(self._ahead)) <= step:
                self._ahead.popitem(last=False)
        return link


def _link(previous: bytes, ids: NDArray[np.int64]) -> bytes:
    return hashlib.sha256(previous + ids.astype("<i8").tobytes()).digest()


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
