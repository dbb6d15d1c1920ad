"""One-shot service: make the Prefect server know the hosts and the flows. Safe to run at every start.

Creates the work pool and one queue per host (a queue is what quarantine pauses), then registers the deployments of
``prefect.yaml``. It never unpauses a queue: that decision is not its own.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists

__all__ = ["POOL", "ensure_queues", "main"]

POOL = "hosts"
CONTROL = "control"

log = logging.getLogger(__name__)


async def ensure_queues(client: PrefectClient, hosts: Sequence[str], *, pool: str = POOL) -> None:
    """Create the pool and its queues where they are missing; one flow run at a time on each host's queue."""
    try:
        await client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        log.info("created work pool %s", pool)
    except ObjectAlreadyExists:
        log.info("work pool %s exists", pool)
    for name, limit in [(CONTROL, None), *((host, 1) for host in hosts)]:
        try:
            await client.create_work_queue(name=name, work_pool_name=pool, concurrency_limit=limit)
            log.info("created work queue %s", name)
        except ObjectAlreadyExists:
            log.info("work queue %s exists", name)


async def _queues(hosts: Sequence[str]) -> None:
    async with get_client() as client:
        await ensure_queues(client, hosts)


def main(hosts: Sequence[str]) -> int:
    """Set up the queues of these hosts and every deployment; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per request otherwise
    if not hosts:
        log.error("usage: python -m infra.setup HOST [HOST ...]")
        return 64
    asyncio.run(_queues(hosts))
    deploy = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    return subprocess.run(deploy, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
