"""Which generation this process belongs to, and where its courier is.

Under a launcher everything is given by its folder. In a program of the user's own, rank 0 starts the generation and tells the others
through the process group (once, on the main thread), and each rank starts its own courier, which also keeps the lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.checkpoint.generation import GenerationClaim, Lease, open_run, start_generation
from torchrelay.checkpoint.host import this_process
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.sharing import HostShare
from torchrelay.config import RunSpec
from torchrelay.errors import CorruptionError, TorchrelayError
from torchrelay.state.request import GenerationRequest
from torchrelay.state.tenure import own_loop_spec
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["Session", "open_session"]

_OWN_LEASE_S = 15.0


class Session:
    """Rank, world size, generation and courier of this process."""

    def __init__(
        self, request: GenerationRequest, folder: Path, *, rank: int, world_size: int, own: RunSpec | None
    ) -> None:
        self.request, self.rank, self.world_size = request, rank, world_size
        self._folder, self._own = folder, own
        self._courier: subprocess.Popen[bytes] | None = None
        local = rank if own else int(os.environ.get("LOCAL_RANK", rank))
        self.courier_path = folder / f"courier-{local}.sock"
        self.seed: int = request.spec["run"]["seed"] if "run" in request.spec else int(request.spec.get("seed", 0))
        digest = (request.spec.get("digest") or RunSpec(**request.spec["run"]).digest()) if request.spec else ""
        self.spec_digest: str = digest

    def ref(self, step: int) -> ManifestRef:
        """Name of this generation's checkpoint at a step."""
        return ManifestRef(step, self.request.generation)

    def revive_courier(self) -> None:
        """Start the courier if this process owns it and it does not run (the launcher does it otherwise)."""
        if self._own is None or (self._courier is not None and self._courier.poll() is None):
            return
        environment = {
            **os.environ,
            "TORCHRELAY_WORKDIR": str(self._folder),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
        }
        command = [sys.executable, "-m", "torchrelay.state.courier"]
        with (self._folder / f"courier-{self.rank}.log").open("ab") as log:
            self._courier = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def step_back(self) -> bool:
        """Begin a new generation after the present one's checkpoint was marked damaged; False if that is for somebody else to do."""
        if self._own is None or self.world_size > 1:
            return False
        store = open_store(self.request.store_url)
        outcome = {
            "kind": "corruption",
            "generation": self.request.generation,
            "begin_step": 0,
            "last_step": 0,
            "committed_step": 0,
        }
        claim = GenerationClaim(
            run_id=self.request.run_id, generation=self.request.generation, begin=self.request.begin, fenced=True
        )
        Lease(store, claim, lease_s=_OWN_LEASE_S).end(outcome)
        names = ("upload_mib_s", "courier_cores", "partial_commits")
        caps: dict[str, Any] = {name: getattr(self.request, name) for name in names}
        self.request = replace(_claim(store, self._own, world_size=1, drain_s=self.request.drain_s), **caps)
        self.request.write(self._folder)
        return True

    @contextlib.contextmanager
    def sharing(self) -> Iterator[HostShare | None]:
        """What the ranks of this host fetch for each other; None if there is only one."""
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if ranks == 1 or self.world_size == 1:
            yield None
            return
        request, rank = self.request, int(os.environ.get("LOCAL_RANK", "0"))
        try:
            share = HostShare(request.run_id, request.generation, rank=rank, ranks=ranks)
        except OSError:
            yield None
            return
        try:
            yield share
        finally:
            share.done()

    def close(self) -> None:
        """Wait for an own courier to finish, and remove the folder."""
        if self._own is None:
            return
        if self._courier is not None:
            self._courier.terminate()  # dismisses it: it finishes what is staged, but waits for no rank
            self._courier.wait(timeout=self.request.drain_s + 10.0)
        shutil.rmtree(self._folder, ignore_errors=True)


def open_session(run: RunSpec | str, *, store: str, drain_s: float, caps: Mapping[str, Any] | None = None) -> Session:
    """Join the launcher's generation, or start one. ``caps`` are fields of the request that hold for couriers of one's own."""
    rank, world_size = _rank_and_world()
    launched = os.environ.get("TORCHRELAY_WORKDIR")
    if launched:
        folder = Path(launched)
        return Session(GenerationRequest.read(folder), folder, rank=rank, world_size=world_size, own=None)
    spec = own_loop_spec(run)
    request: GenerationRequest | None = None
    failure: TorchrelayError | None = None
    if rank == 0:
        try:
            opened = open_store(store)
            open_run(opened, spec, provenance={"program": Path(sys.argv[0]).name})
            request = replace(_claim(opened, spec, world_size=world_size, drain_s=drain_s), **(caps or {}))
        except TorchrelayError as error:
            failure = error
    answer = _broadcast(request, failure, world_size=world_size)
    folder = Path(tempfile.mkdtemp(prefix="torchrelay-"))
    answer.write(folder)
    return Session(answer, folder, rank=rank, world_size=world_size, own=spec)


def _claim(store: ObjectStore, spec: RunSpec, *, world_size: int, drain_s: float) -> GenerationRequest:
    info = {
        "host": this_process().host,
        "origin": f"own-loop-{os.getpid()}",
        "why": "started by the program itself",
        "world_size": world_size,
    }
    claim = start_generation(store, spec.run_id, info=info, lease_s=_OWN_LEASE_S)
    return GenerationRequest(
        run_id=spec.run_id,
        generation=claim.generation,
        begin_key=claim.begin_key,
        store_url=store.url,
        spec={"digest": spec.digest(), "seed": spec.seed},
        drain_s=drain_s,
        lease_s=_OWN_LEASE_S,
    )


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _broadcast(
    request: GenerationRequest | None, failure: TorchrelayError | None, *, world_size: int
) -> GenerationRequest:
    """Give rank 0's request (or its error) to all ranks."""
    if world_size == 1:
        if failure is not None:
            raise failure
        assert request is not None
        return request
    body: dict[str, Any] = {"error": str(failure)} if failure else {}
    if request is not None:
        body = {name: getattr(request, name) for name in GenerationRequest.__dataclass_fields__}
    data = torch.tensor(list(json.dumps(body).encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)], dtype=torch.int64)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    size = size.to(device)
    dist.broadcast(size, src=0)
    data = (
        data.to(device)
        if request is not None or failure is not None
        else torch.empty(int(size), dtype=torch.uint8, device=device)
    )
    dist.broadcast(data, src=0)
    if failure is not None:
        raise failure
    answer = json.loads(bytes(data.cpu().tolist()))
    if "error" in answer:
        raise CorruptionError(f"rank 0 could not start the generation: {answer['error']}")
    return GenerationRequest(**answer)
