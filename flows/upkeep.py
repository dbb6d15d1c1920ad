"""The flow ``upkeep``: care of the store, run by run, beside training or when nothing trains.

Whoever dies in it leaves less of the same work for the next round; nothing needs to be repaired.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from tasks.upkeep import Tended, tend_run, upkeep_page
from torchrelay.checkpoint.generation import list_runs
from torchrelay.config import UpkeepSpec
from torchrelay.errors import NotFoundError, TorchrelayError
from torchrelay.store import open_store

__all__ = ["upkeep"]


@flow(
    name="upkeep",
    description="Verify checkpoints, forget what newer ones supersede, and free the space of what counts for nobody.",
    persist_result=False,
    retries=0,
)
async def upkeep(spec: UpkeepSpec) -> State[Any]:
    """One round over the runs that ``spec`` names. Failed if damage was found or a run could not be tended; the others are tended all the same."""
    rows: list[Tended] = []
    try:
        for run_id in await asyncio.to_thread(_runs, spec):
            try:
                rows.append(await asyncio.to_thread(tend_run, spec, run_id))
            except TorchrelayError as error:
                rows.append(Tended(run_id=run_id, problems=[str(error)]))
    except TorchrelayError as error:
        return Failed(message=str(error))
    await acreate_markdown_artifact(
        upkeep_page(rows, dry_run=spec.dry_run), key="upkeep", description="Care of the store, newest round"
    )
    problems = [f"{row.run_id}: {problem}" for row in rows for problem in row.problems]
    if problems:
        return Failed(message=f"{len(problems)} problems: " + "; ".join(problems[:5]))
    freed = sum(row.freed_bytes for row in rows) / 2**20
    verb = "would free" if spec.dry_run else "freed"
    return Completed(
        message=f"{len(rows)} runs tended: {sum(row.verified for row in rows)} verified, {verb} {freed:.1f} MiB."
    )


def _runs(spec: UpkeepSpec) -> list[str]:
    store = open_store(spec.store)
    known = list_runs(store)
    for run_id in spec.runs:
        if run_id not in known:
            raise NotFoundError(
                f"no run {run_id!r} in {store.url}", hint=f"there are: {', '.join(known[-8:]) or 'none'}"
            )
    return list(spec.runs) or known
