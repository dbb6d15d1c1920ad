"""A store whose n-th call fails, before or after it took effect: run a scenario for every n and see that nothing is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from torchrelay.errors import StoreUnavailableError
from torchrelay.store.base import Capabilities, Created, Listing, ObjectStore, Payload

__all__ = ["FaultyStore", "SimulatedCrash"]

_T = TypeVar("_T")


class SimulatedCrash(BaseException):
    """The process dies here: no ``except Exception`` may catch it."""


class FaultyStore:
    """Passes calls to ``inner`` and counts them; call number ``fail_at`` (from 1) fails, and with ``persistent`` all later ones too.

    ``effect`` is "before" (the call never reached the store) or "after" (it did, and the answer was lost). ``error`` makes the exception.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        fail_at: int | None = None,
        effect: Literal["before", "after"] = "before",
        persistent: bool = False,
        error: Callable[[], BaseException] = lambda: StoreUnavailableError("injected fault"),
    ) -> None:
        self._inner, self._fail_at, self._effect = inner, fail_at, effect
        self._persistent, self._error = persistent, error
        self._lock = threading.Lock()
        self.calls = 0
        self.log: list[str] = []

    @property
    def url(self) -> str:
        """As the inner store's."""
        return self._inner.url

    def put(self, key: str, data: Payload) -> None:
        """Counted."""
        self._call(f"put {key}", lambda: self._inner.put(key, data))

    def create(self, key: str, data: bytes) -> Created:
        """Counted."""
        return self._call(f"create {key}", lambda: self._inner.create(key, data))

    def get(
        self, key: str, *, offset: int = 0, length: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """Counted."""
        return self._call(f"get {key}", lambda: self._inner.get(key, offset=offset, length=length, into=into))

    def list(self, prefix: str, *, after: str = "", limit: int | None = None) -> Listing:
        """Counted."""
        return self._call(f"list {prefix}", lambda: self._inner.list(prefix, after=after, limit=limit))

    def delete(self, keys: Sequence[str]) -> None:
        """Counted."""
        self._call(f"delete {len(keys)}", lambda: self._inner.delete(keys))

    def probe(self) -> Capabilities:
        """Counted."""
        return self._call("probe", self._inner.probe)

    def _call(self, name: str, call: Callable[[], _T]) -> _T:
        with self._lock:
            self.calls += 1
            number = self.calls
            self.log.append(name)
        fails = self._fail_at is not None and (number == self._fail_at or (self._persistent and number > self._fail_at))
        if not fails:
            return call()
        if self._effect == "after":
            with contextlib.suppress(Exception):  # the answer is lost, whatever it was
                call()
        raise self._error()
