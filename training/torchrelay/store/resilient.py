"""Retries and deadlines around any store: the same six verbs, calmer.

Only what may succeed later is tried again, with full jitter and a deadline per call that grows with the bytes. All verbs are safe
to repeat (see their promises), ``create`` because its answer is resolved by reading back. A ``get`` that broke off is taken up where it stopped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torchrelay.errors import RetryableError, StoreUnavailableError
from torchrelay.store.base import Capabilities, Created, Listing, ObjectStore, Payload, views_of

__all__ = ["ResilientStore", "RetryPolicy"]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """First and longest wait (seconds), and the deadline of a call: ``base_s`` plus its bytes at ``bytes_per_s``.

    The defaults ride out a restart of the server; whoever can wait longer (the courier) tries again on top.
    """

    first_s: float = 0.2
    longest_s: float = 20.0
    base_s: float = 10.0
    bytes_per_s: float = 5e6


class ResilientStore:
    """Wraps a store. Clock, sleep and random generator are arguments, so that a test can replay them."""

    def __init__(
        self,
        inner: ObjectStore,
        policy: RetryPolicy | None = None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._inner, self._policy = inner, policy or RetryPolicy()
        self._monotonic, self._sleep, self._rng = monotonic, sleep, rng or random.Random()

    @property
    def inner(self) -> ObjectStore:
        """The store itself."""
        return self._inner

    @property
    def url(self) -> str:
        """As the inner store's."""
        return self._inner.url

    def put(self, key: str, data: Payload) -> None:
        """As the inner store's, tried again."""
        self._retry(lambda: self._inner.put(key, data), size=sum(len(view) for view in views_of(data)))

    def create(self, key: str, data: bytes) -> Created:
        """As the inner store's, tried again: an attempt whose reply was lost is found by the next one, which reads back our own bytes."""
        return self._retry(lambda: self._inner.create(key, data), size=len(data))

    def get(
        self, key: str, *, offset: int = 0, length: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """As the inner store's, tried again."""
        size = length if length is not None else (len(into) if into is not None else 0)
        return self._retry(lambda: self._inner.get(key, offset=offset, length=length, into=into), size=size)

    def list(self, prefix: str, *, after: str = "", limit: int | None = None) -> Listing:
        """As the inner store's, tried again."""
        return self._retry(lambda: self._inner.list(prefix, after=after, limit=limit))

    def delete(self, keys: Sequence[str]) -> None:
        """As the inner store's, tried again."""
        self._retry(lambda: self._inner.delete(keys))

    def probe(self) -> Capabilities:
        """As the inner store's, tried again."""
        return self._retry(self._inner.probe)

    def _retry(self, call: Callable[[], _T], *, size: int = 0) -> _T:
        policy = self._policy
        deadline = self._monotonic() + policy.base_s + size / policy.bytes_per_s
        wait_s = policy.first_s
        while True:
            try:
                return call()
            except RetryableError as error:
                asked_s = error.retry_after_s if isinstance(error, StoreUnavailableError) else None
                # Full jitter, so that many ranks that failed together do not come back together.
                pause_s = min(policy.longest_s, asked_s) if asked_s is not None else self._rng.uniform(0.0, wait_s)
                if self._monotonic() + pause_s > deadline:
                    raise
                self._sleep(pause_s)
                wait_s = min(2 * wait_s, policy.longest_s)
