"""The generation in which this process writes a run's checkpoints by hand (``dcp``, ``intake``): one for all saves, however many writers.

Between two saves its lease is ended, so that whoever comes next need not wait. A save whose end was not heard of ends the generation: its
half-written records must never be completed by those of a second try.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from torchrelay.checkpoint.generation import GenerationClaim, Lease, open_run, start_generation
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.host import this_process
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.config import RunSpec
from torchrelay.errors import ConfigError, FencedError, TorchrelayError
from torchrelay.store.base import ObjectStore

__all__ = ["Tenure", "begin_save", "own_loop_spec"]

_LEASE_S = 60.0  # a save that takes longer may be overtaken by another start of the run, and is then refused


@dataclass(slots=True)
class Tenure:
    """A generation held by this process, and the step that is being saved in it (0: none).

    ``base`` is the checkpoint whose packs the save may refer to: the one that was saved last, while it counts.
    """

    claim: GenerationClaim
    lease: Lease
    saving: int = 0
    committed: int = 0
    base: ManifestRef | None = None

    def ref(self, step: int) -> ManifestRef:
        """Name of this generation's checkpoint at a step."""
        return ManifestRef(step, self.claim.generation)

    def end_save(self, *, committed: bool) -> None:
        """Say that the save is over. A store that is away now costs nothing: the lease lapses by itself."""
        if committed:
            self.committed = self.saving
        outcome = {
            "kind": "completed",
            "generation": self.claim.generation,
            "begin_step": self.claim.begin_step,
            "last_step": self.saving,
            "committed_step": self.committed or self.claim.begin_step,
        }
        self.saving = 0
        with contextlib.suppress(TorchrelayError):
            self.lease.end(outcome, step=self.committed)


_HELD: dict[tuple[int, str, str], Tenure] = {}


def own_loop_spec(run: RunSpec | str) -> RunSpec:
    """The identity of a run whose loop is the user's own."""
    return run if isinstance(run, RunSpec) else RunSpec(run_id=run, job="own_loop:main", total_steps=2**31)


def begin_save(
    store: ObjectStore, spec: RunSpec, *, step: int, world_size: int, before: int = 0, why: str = ""
) -> Tenure:
    """Have a generation to save ``step`` in.

    ``before`` is the generation the caller saved in last (0: none): if another start of the run has taken over since, it must not go on, and
    FencedError is raised. Raises ConfigError for a step that is not past the newest checkpoint, RunBusyError if somebody else trains the run.
    """
    latest = read_history(store, spec.run_id).latest
    _check_step(spec.run_id, step, latest.step if latest else 0)
    key = (os.getpid(), store.url, spec.run_id)
    if not _goes_on(_HELD.get(key), step=step, before=before):
        _HELD.pop(key, None)
        open_run(store, spec, provenance={"program": Path(sys.argv[0]).name})
        host = this_process().host
        info = {"host": host, "origin": f"own-loop-{os.getpid()}", "why": why, "world_size": world_size}
        claim = start_generation(store, spec.run_id, info=info, lease_s=_LEASE_S)
        tenure = _HELD[key] = Tenure(claim, Lease(store, claim, lease_s=_LEASE_S))
        tenure.lease.renew(step=claim.begin_step)
    tenure = _HELD[key]
    try:
        _check_step(spec.run_id, step, tenure.claim.begin_step)  # a save that a predecessor left complete counts now
    except ConfigError:
        tenure.end_save(committed=False)
        raise
    tenure.saving = step
    tenure.base = latest if latest == tenure.ref(tenure.committed) else None
    return tenure


def _goes_on(tenure: Tenure | None, *, step: int, before: int) -> bool:
    """Whether a save may be made in the generation that is held. Ends it if not."""
    if tenure is None:
        return False
    if tenure.saving or step <= tenure.committed:  # half-written, or forgotten since: names that are taken
        tenure.end_save(committed=False)
        return False
    try:
        tenure.lease.renew(step=tenure.committed)
    except FencedError:
        if before == tenure.claim.generation:
            raise
        return False
    return True


def _check_step(run_id: str, step: int, committed: int) -> None:
    if step < 1:
        raise ConfigError(f"step {step} cannot be saved", hint="steps are counted from 1: how many were done")
    if step <= committed:
        raise ConfigError(
            f"step {step} cannot be saved: step {committed} of run {run_id!r} is committed already",
            hint="load that one and save later steps, or start a new run",
        )
