"""Which checkpoints to keep: a pure function of the line, what was verified, ages and pins; and forgetting the others.

Forgetting drops a manifest and nothing else: from then on the checkpoint exists for nobody, and its losses stay with the run. The space is freed
by ``sweep``, later. Kept are always the newest checkpoint, the one that the newest generation began at, and all that is newer than the last few
*verified* ones: what is not known to be good supersedes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchrelay.checkpoint.history import History, read_history
from torchrelay.checkpoint.layout import ManifestRef, manifests_prefix, parse_manifest_key
from torchrelay.checkpoint.marks import list_pins, list_verified, write_forgotten
from torchrelay.checkpoint.reader import load_manifest
from torchrelay.errors import ConfigError, CorruptionError, NotFoundError
from torchrelay.store.base import ObjectStore

__all__ = ["Choice", "Dated", "RetentionPolicy", "choose", "forget", "plan_retention"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPolicy:
    """What to keep.

    ``newest``: so many of the newest verified checkpoints, and all that is newer than they. ``every_steps``: those at multiples of it, for ever
    (0: none). The ladder: going back from ``ladder_base_s`` to ``ladder_top_s`` seconds, each next one is at most twice as old as the one before
    (0: no ladder), so that a fault that is found late still has a checkpoint from before its onset.
    """

    newest: int = 3
    every_steps: int = 0
    ladder_base_s: float = 600.0
    ladder_top_s: float = 24 * 3600.0

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise ConfigError(f"at least one verified checkpoint must be kept, not {self.newest}")
        if self.every_steps < 0 or self.ladder_base_s < 0 or self.ladder_top_s < 0:
            raise ConfigError("every_steps and the ladder's ages must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class Dated:
    """A checkpoint on the line. ``age_s`` is the time since its commit by the store's own clock; newer steps are never older."""

    ref: ManifestRef
    age_s: float
    verified: bool = False
    damaged: bool = False
    pinned: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What is to become of one checkpoint: the rules that keep it; none if it may be forgotten, and why."""

    ref: ManifestRef
    kept_by: tuple[str, ...]
    why: str = ""

    @property
    def forget(self) -> bool:
        """Nothing keeps it."""
        return not self.kept_by


def choose(line: Sequence[Dated], policy: RetentionPolicy, *, needed: Iterable[ManifestRef] = ()) -> list[Choice]:
    """Decide about every checkpoint of the line (ascending by step, damaged ones included). ``needed`` are in use and kept.

    Until ``newest`` verified ones exist nothing is superseded and nothing is forgotten. Damaged ones count for no rule; they go when they are
    older than the newest verified ones.
    """
    reasons: dict[ManifestRef, list[str]] = {item.ref: [] for item in line}
    clean = [item for item in line if not item.damaged]
    if clean:
        reasons[clean[-1].ref].append("the newest")
    for ref in needed:
        if ref in reasons:
            reasons[ref].append("the newest generation began here")
    verified = [item.ref for item in clean if item.verified][-policy.newest :]
    floor = verified[0].step if len(verified) == policy.newest else -1
    for item in line:
        if item.pinned:
            reasons[item.ref].append("pinned")
        if item.ref.step >= floor:
            known = item.ref in verified
            reasons[item.ref].append(f"among the newest {policy.newest} verified" if known else "no older than they")
        if policy.every_steps and item.ref.step % policy.every_steps == 0 and not item.damaged:
            reasons[item.ref].append(f"every {policy.every_steps} steps")
    for ref in _ladder([item for item in clean if item.ref.step <= floor], policy):
        reasons[ref].append("the ladder")
    gone = f"superseded by {len(verified)} verified checkpoints from step {floor} on"
    return [
        Choice(ref=item.ref, kept_by=tuple(reasons[item.ref]), why="" if reasons[item.ref] else gone) for item in line
    ]


def _ladder(superseded: Sequence[Dated], policy: RetentionPolicy) -> list[ManifestRef]:
    """Go back in time: each next one is the oldest that is at most twice as old as the last, or else the next there is.

    Ages grow alike, so the ratio of two neighbours only shrinks: what one pass keeps satisfies the next, and no gap opens by waiting. The first
    one past the top is kept too; so the whole of the ladder's time always has something behind it.
    """
    if not policy.ladder_base_s or not superseded:
        return []
    older = sorted(superseded, key=lambda item: -item.ref.step)
    kept = []
    age_s, place = 0.0, -1
    while place + 1 < len(older) and age_s < policy.ladder_top_s:
        reach_s = 2 * max(age_s, policy.ladder_base_s / 2)
        within = [index for index in range(place + 1, len(older)) if older[index].age_s <= reach_s]
        place = within[-1] if within else place + 1
        age_s = older[place].age_s
        kept.append(older[place].ref)
    return kept


def plan_retention(store: ObjectStore, run_id: str, policy: RetentionPolicy) -> list[Choice]:
    """Read the run's line and decide about it; changes nothing."""
    history = read_history(store, run_id)
    verified, pins = list_verified(store, run_id), list_pins(store, run_id)
    listing = store.list(manifests_prefix(run_id))
    age_s = {
        ref: listing.server_time_s - item.modified_s
        for item in listing.objects
        if (ref := parse_manifest_key(item.key))
    }
    line = []
    older_s = 0.0
    for ref in sorted({*history.line, *(history.damaged & age_s.keys())}, reverse=True):
        older_s = max(
            older_s, age_s.get(ref, 0.0)
        )  # a copy of the bucket has new dates; the order of steps is what counts
        marks = {"verified": ref in verified, "damaged": ref in history.damaged, "pinned": ref in pins}
        line.append(Dated(ref=ref, age_s=older_s, **marks))
    return choose(line[::-1], policy, needed=_needed(history))


def forget(store: ObjectStore, run_id: str, ref: ManifestRef, *, why: str) -> bool:
    """Drop a manifest, its losses kept; False if the checkpoint has become one that is needed since it was chosen.

    The losses are written first, so whoever dies in between leaves a checkpoint that still counts, and forgetting again finishes it.
    """
    history = read_history(store, run_id)
    if history.unreadable:
        raise CorruptionError(
            f"nothing can be forgotten in run {run_id!r}: {history.unreadable[0]} cannot be read, so what its generation needs is not known",
            hint="the next start of the run writes a new one",
        )
    if ref in _needed(history) or ref in history.line[-1:] or ref in list_pins(store, run_id):
        return False
    manifest = None
    try:
        manifest = load_manifest(store, run_id, ref)
    except NotFoundError:
        return True
    except CorruptionError:
        if ref not in history.damaged:
            raise  # it is marked first, by verify or by a load
    write_forgotten(store, run_id, ref, manifest, why=why)
    store.delete([ref.key(run_id)])
    return True


def _needed(history: History) -> frozenset[ManifestRef]:
    """A generation's couriers may refer to packs of the checkpoint it began at as long as it may live."""
    begin = history.newest.begin if history.newest else None
    return frozenset({begin} if begin else ())
