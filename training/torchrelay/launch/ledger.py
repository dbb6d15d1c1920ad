"""The ledger of save intervals: every change of mind of a generation's tuner, with its reason, and what the next generation goes on from.

One sealed object per generation, written by its launcher alone with plain PUTs, from a thread of its own: a slow store delays neither training nor
the watch over it. Best effort: what cannot be written is told once, and the next generation learns anew.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from torchrelay.checkpoint.layout import interval_ledger_key, interval_ledger_prefix, parse_interval_ledger_key
from torchrelay.checkpoint.sealed import seal, unseal
from torchrelay.errors import TorchrelayError
from torchrelay.relay import FREE_KINDS, GenerationSummary, read_status
from torchrelay.store.base import ObjectStore

__all__ = ["IntervalLedger", "read_interval_ledger"]

_EVERY_S = (
    60.0  # the state is written so often without a change of mind: a launcher that is killed loses this much exposure
)
_KEEP_CHANGES = 200
_STATE_FILE = "interval.json"


class IntervalLedger:
    """Takes the ``interval`` events of rank 0. ``emit`` gets a notice for each change of mind."""

    def __init__(
        self, store: ObjectStore, run_id: str, generation: int, *, folder: Path, emit: Callable[[dict[str, Any]], None]
    ) -> None:
        self._store, self._run_id, self._generation, self._emit = store, run_id, generation, emit
        self._changes: list[dict[str, Any]] = []
        self._state: dict[str, Any] = {}
        self._written_s = time.monotonic()
        self._work: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._hand_down(folder)
        self._thread = threading.Thread(target=self._write_forever, name="ledger", daemon=True)
        self._thread.start()

    def take(self, event: dict[str, Any]) -> bool:
        """Take one event of a child; False if it is none of ours."""
        if event.get("event") != "interval":
            return False
        self._state = event["state"]
        if event["changed"]:
            line = {name: event[name] for name in ("step", "interval_steps", "interval_s", "reason")}
            self._changes = [*self._changes, {**line, "time_s": round(time.time(), 3)}][-_KEEP_CHANGES:]
            text = f"from step {event['step']} on a save every {event['interval_steps']} steps: {event['reason']}"
            self._emit({"event": "notice", "message": text})
        if event["changed"] or time.monotonic() - self._written_s > _EVERY_S:
            self._write()
        return True

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Write the last state; waits at most ``timeout_s`` for the store."""
        if self._state:
            self._write()
        self._work.put(None)
        self._thread.join(timeout_s)

    def _write(self) -> None:
        self._written_s = time.monotonic()
        body = {"generation": self._generation, "changes": self._changes, "tuner": self._state}
        self._work.put(seal("intervals", body))

    def _write_forever(self) -> None:
        told = False
        while (data := self._work.get()) is not None:
            try:
                self._store.put(interval_ledger_key(self._run_id, self._generation), data)
            except TorchrelayError as error:
                if not told:
                    told = True
                    self._emit({"event": "notice", "message": f"the ledger of intervals could not be written: {error}"})

    def _hand_down(self, folder: Path) -> None:
        """Leave the ranks what earlier generations have learnt, their failures included."""
        try:
            known = read_interval_ledger(self._store, self._run_id, before=self._generation)
            if known is None:
                return
            number, state = int(known["generation"]), dict(known["tuner"])
            recent = read_status(self._store, self._run_id).generations
            grace_s = median(state["commits_s"] or [0.0])
            state["failures"] = int(state["failures"]) + sum(
                number <= item.number < self._generation and _counts(item, grace_s) for item in recent
            )
        except (TorchrelayError, KeyError, TypeError, ValueError) as error:
            message = f"what earlier generations learnt of the save interval cannot be used: {error}"
            self._emit({"event": "notice", "message": message})
            return
        (folder / _STATE_FILE).write_text(json.dumps(state), encoding="utf-8")


def read_interval_ledger(store: ObjectStore, run_id: str, *, before: int | None = None) -> Mapping[str, Any] | None:
    """Return the newest entry (of a generation ``before`` that one): generation, changes, tuner. None where there is none.

    Raises CorruptionError for a damaged one, and what the store raises.
    """
    keys = [item.key for item in store.list(interval_ledger_prefix(run_id)).objects]
    numbers = [number for key in keys if (number := parse_interval_ledger_key(key)) is not None]
    newest = max((number for number in numbers if before is None or number < before), default=None)
    if newest is None:
        return None
    key = interval_ledger_key(run_id, newest)
    return unseal("intervals", store.get(key), where=key)


def _counts(item: GenerationSummary, grace_s: float) -> bool:
    """Whether this generation ended by a failure that a shorter interval could have made cheaper: it came after ``grace_s`` of training.

    One that died without a word did so by a failure.
    """
    outcome = item.outcome
    if outcome is None:
        return True
    trained_s = outcome.stats.get("wall_s", 0.0) - outcome.stats.get("first_step_s", float("inf"))
    return outcome.kind not in FREE_KINDS and trained_s > grace_s
