"""Care of one run's checkpoints: verify, forget, sweep; the same for the command line and the ``upkeep`` flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.interval import ladder_base_s
from torchrelay.checkpoint.layout import ManifestRef, manifests_prefix, parse_manifest_key
from torchrelay.checkpoint.marks import list_verified
from torchrelay.checkpoint.reader import verify_and_mark
from torchrelay.checkpoint.retention import Choice, RetentionPolicy, forget, plan_retention
from torchrelay.config import KeepSpec
from torchrelay.errors import CorruptionError, NotFoundError, TorchrelayError
from torchrelay.launch.ledger import read_interval_ledger
from torchrelay.store.base import ObjectStore

__all__ = ["Verified", "forget_superseded", "policy_of", "verify_unverified"]

_BASE_S = 600.0  # while nothing tells how often the run saves


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """The result of reading one checkpoint back: bytes read, or what is wrong with it."""

    ref: ManifestRef
    size_bytes: int = 0
    problem: str = ""


def policy_of(store: ObjectStore, run_id: str, keep: KeepSpec) -> RetentionPolicy:
    """Return the policy for a run: its ladder begins at a few save intervals, the chosen one or else the one that is seen."""
    return RetentionPolicy(
        newest=keep.newest,
        every_steps=keep.every_steps,
        ladder_base_s=ladder_base_s(_interval_s(store, run_id)) if keep.ladder_hours else 0.0,
        ladder_top_s=3600 * keep.ladder_hours,
    )


def _interval_s(store: ObjectStore, run_id: str) -> float:
    try:
        ledger = read_interval_ledger(store, run_id)
        if ledger and ledger["changes"]:
            return float(ledger["changes"][-1]["interval_s"])
    except (TorchrelayError, KeyError, TypeError, ValueError):
        pass  # a ladder by what is seen is as good
    objects = store.list(manifests_prefix(run_id)).objects
    times = sorted(item.modified_s for item in objects if parse_manifest_key(item.key))[-20:]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return median(gaps) if gaps else _BASE_S


def verify_unverified(
    store: ObjectStore, run_id: str, policy: RetentionPolicy, *, limit: int, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Verified]:
    """Read back what is kept and nobody has verified yet, newest first, at most ``limit`` checkpoints; each is marked with the result.

    Until enough are known to be good all are kept, so these come first.
    """
    tried: set[ManifestRef] = set()
    while len(tried) < limit and not stopped():
        done = tried | list_verified(store, run_id) | read_history(store, run_id).damaged
        kept = [choice.ref for choice in plan_retention(store, run_id, policy) if not choice.forget]
        left = [ref for ref in kept if ref not in done]
        if not left:
            return
        tried.add(left[-1])
        try:
            yield Verified(ref=left[-1], size_bytes=verify_and_mark(store, run_id, left[-1]))
        except CorruptionError as error:
            yield Verified(ref=left[-1], problem=str(error))
        except NotFoundError:
            continue  # forgotten meanwhile


def forget_superseded(store: ObjectStore, run_id: str, choices: Iterable[Choice]) -> list[Choice]:
    """Forget what nothing keeps; returns what was forgotten."""
    return [choice for choice in choices if choice.forget and forget(store, run_id, choice.ref, why=choice.why)]
