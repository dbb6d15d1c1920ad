"""Freeing the space of what counts for nobody: a plan first, then its execution.

Why it is safe beside training (``docs/decisions/sweep.md``): a key is written only by the save it is named after, so deleting what an old save left
never meets a write; a live save refers only to packs that its own last record, or the checkpoint its generation began at, names, and these are live.
Records go before packs, so that nobody can finish the commit of what is half gone; dying anywhere leaves less of the same debris.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torchrelay.checkpoint.layout import ManifestRef, forgotten_key
from torchrelay.checkpoint.survey import Finding, Survey
from torchrelay.errors import CorruptionError
from torchrelay.store.base import ObjectStore

__all__ = ["GRACE_S", "SweepPlan", "plan_sweep", "sweep"]

GRACE_S = 24 * 3600.0
"""What is younger stays: somebody may still read a checkpoint that was forgotten, or look into a branch that was left."""

_BATCH = 500
_ORDER = ("manifest", "record", "pack", "mark")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """Objects to delete, in the order of their deletion; and how many stay for now because they are ``young``."""

    run_id: str
    findings: tuple[Finding, ...]
    young: int

    @property
    def size_bytes(self) -> int:
        """Bytes that it frees."""
        return sum(finding.info.size_bytes for finding in self.findings)


def plan_sweep(survey: Survey, *, grace_s: float = GRACE_S) -> SweepPlan:
    """Choose what to delete: all that is forgotten or debris, checkpoint by checkpoint, if the youngest object of it is older than ``grace_s``.

    Ages are by the store's own clock. Raises CorruptionError while a live document is unreadable: what it needs is not known then.
    """
    if survey.unreadable:
        raise CorruptionError(
            f"nothing can be swept in run {survey.run_id!r}: {survey.unreadable[0]} cannot be read, so what it needs is not known",
            hint=f"torchrelay verify {survey.run_id} marks what is damaged; torchrelay forget {survey.run_id} --step N gives it up",
        )
    groups: dict[ManifestRef, list[Finding]] = defaultdict(list)
    youngest_s: dict[ManifestRef, float] = defaultdict(float)
    for finding in survey.findings:
        if finding.ref is None:
            continue
        if finding.status in ("forgotten", "debris"):
            groups[finding.ref].append(finding)
        if finding.status in ("forgotten", "debris") or finding.info.key == forgotten_key(survey.run_id, finding.ref):
            youngest_s[finding.ref] = max(youngest_s[finding.ref], finding.info.modified_s)
    ripe = [ref for ref in sorted(groups) if survey.server_time_s - youngest_s[ref] >= grace_s]
    chosen = [finding for ref in ripe for finding in groups[ref]]
    chosen.sort(key=lambda finding: (_ORDER.index(finding.kind), finding.info.key))
    return SweepPlan(run_id=survey.run_id, findings=tuple(chosen), young=sum(map(len, groups.values())) - len(chosen))


def sweep(store: ObjectStore, plan: SweepPlan) -> int:
    """Delete what the plan names, and return the bytes that were freed. Dying anywhere is harmless; the next plan names the rest."""
    for keys in _batches(plan):
        store.delete(keys)
    return plan.size_bytes


def _batches(plan: SweepPlan) -> Iterator[list[str]]:
    for kind in _ORDER:
        keys = [finding.info.key for finding in plan.findings if finding.kind == kind]
        for start in range(0, len(keys), _BATCH):
            yield keys[start : start + _BATCH]
