"""The courier: a process beside each rank that hashes, uploads and commits what the rank has staged in shared memory.

It outlives its rank: a snapshot that was complete when the rank died is still written and committed. It never gives up on a
snapshot while its rank lives (a store that is away comes back); after that it has ``drain_s``. No torch, and no call of the
store is ever made by the rank itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.commit import KnownChunks, Shard, commit_manifest, write_shard
from torchrelay.checkpoint.generation import GenerationClaim, Lease
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.checkpoint.pack import Piece
from torchrelay.checkpoint.reader import load_manifest, load_record
from torchrelay.errors import CorruptionError, FencedError, NotFoundError, TorchrelayError
from torchrelay.state.nodes import join_nodes
from torchrelay.state.pace import Pace
from torchrelay.state.request import GenerationRequest, emit
from torchrelay.state.wire import receive, send
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["Courier", "main"]

_LOG = logging.getLogger(__name__)
_PUTS = 4  # PUTs in parallel
_NICE = 10  # where processors are short, training goes first
_RECORDS = 16  # a checkpoint of more ranks is searched for known chunks only in the own record
_POLL_S = (0.02, 0.5)  # first and longest wait between looks for the other ranks' records
_RETRY_S = (0.5, 10.0)  # first and longest wait after a failed attempt


class Courier:
    """Serves one rank. ``serve`` returns when the rank has gone and nothing more can be done for it."""

    def __init__(
        self, request: GenerationRequest, *, store: ObjectStore, folder: Path, rank: int, local_ranks: int
    ) -> None:
        self._request, self._store, self._folder = request, store, folder
        self._rank, self._local_ranks = rank, local_ranks
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        self._area: mmap.mmap | None = None
        self._layout: dict[str, Any] = {}
        self._known: KnownChunks | None = None
        self._pace = Pace(bytes_per_s=request.upload_mib_s * 2**20, cores=request.courier_cores)
        self._staged: dict[str, Any] | None = None
        self._to_commit: list[ManifestRef] = []
        self._committing = False
        self._served = False
        self._gone_since: float | None = None
        self._stopping = False
        self._dismissed = False
        self._sends = threading.Lock()

    def dismiss(self) -> None:
        """No rank will come any more: finish what is staged, then return from ``serve``. Safe to call in a signal handler."""
        self._dismissed = True

    def serve(self, listener: socket.socket) -> None:
        """Accept the rank's connection (again, if it reconnects) and work until done."""
        tasks = [self._upload_forever]
        tasks += [self._commit_forever] if self._rank == 0 else []
        tasks += [self._lease_forever] if self._rank == 0 and self._request.lease_s else []
        threads = [threading.Thread(target=task, name=task.__name__.strip("_"), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        parent = os.getppid()
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not self._is_done(orphaned=os.getppid() != parent):
                for key, _ in selector.select(timeout=0.1):
                    if key.fileobj is listener:
                        self._accept(listener, selector)
                    else:
                        self._receive(selector)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in threads:
            thread.join(timeout=5.0)

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        connection, _ = listener.accept()
        with self._changed:
            if self._connection:
                selector.unregister(self._connection)
                self._connection.close()
            self._connection, self._served, self._gone_since = connection, True, None
        selector.register(connection, selectors.EVENT_READ)

    def _receive(self, selector: selectors.BaseSelector) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            received = receive(connection)
        except OSError:
            received = None
        if received is None:
            selector.unregister(connection)
            with self._changed:
                connection.close()
                self._connection, self._gone_since = None, time.monotonic()
                self._changed.notify_all()
            self._pace.stop()  # training is over or has fallen: what is staged should be safe soon
            return
        message, fds = received
        with self._changed:
            if message["type"] == "area":
                self._area = mmap.mmap(fds[0], message["size"], access=mmap.ACCESS_READ)
                self._layout = message["layout"]
                os.close(fds[0])
            elif message["type"] == "staged":
                self._staged = message
                self._changed.notify_all()
            elif message["type"] == "commit":  # the courier before this one wrote it and died
                self._to_commit.append(ManifestRef(message["step"], self._request.generation))
                self._changed.notify_all()

    def _is_done(self, *, orphaned: bool) -> bool:
        with self._changed:
            if self._connection is not None:
                return False
            if not self._served:
                return orphaned or self._dismissed
            busy = self._staged is not None or bool(self._to_commit) or self._committing
            gone = time.monotonic() - (self._gone_since or time.monotonic())
        if not busy:
            return True
        if gone > self._request.drain_s:
            _LOG.error("rank=%d gave up on a snapshot %.0f s after its rank had gone", self._rank, gone)
            return True
        return False

    def _tell(self, report: str, **fields: Any) -> None:
        """Tell the rank and the launcher; either may be gone."""
        emit("saved", state=report, rank=self._rank, **fields)
        with self._changed:
            connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError), self._sends:
                send(connection, {"type": report, **fields})

    def _upload_forever(self) -> None:
        with ThreadPoolExecutor(_PUTS, thread_name_prefix="put") as executor:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._staged is not None or self._stopping)
                    message = self._staged
                if message is None:
                    return
                self._upload(message, executor)
                with self._changed:
                    # A rank that reconnects sends its snapshot again: the one just written is done all the same.
                    if self._staged is not None and self._staged["step"] == message["step"]:
                        self._staged = None
                    self._changed.notify_all()

    def _upload(self, message: dict[str, Any], executor: ThreadPoolExecutor) -> None:
        step, began = message["step"], time.monotonic()
        uploaded: list[int] = []

        def pace(work: str, size_bytes: int) -> None:
            if work == "put":
                uploaded.append(size_bytes)
                self._pace.send(size_bytes)
            else:
                self._pace.work()

        for wait_s in _backoff(*_RETRY_S):
            try:
                shard = self._shard(message)
                uploaded.clear()
                self._pace.begin()
                known = self._known_chunks(shard.world_size)
                record = write_shard(self._store, shard, executor=executor, known=known, pace=pace)
                self._known = KnownChunks.of([record])
            except Exception as error:
                if self._report_failure(step, error) or self._pause(wait_s):
                    return
                continue
            with self._changed:
                if self._rank == 0:
                    self._to_commit.append(shard.ref)
                    self._changed.notify_all()
            sizes = {"bytes": shard.size_bytes, "uploaded": sum(uploaded)}
            self._tell("written", step=step, save_s=round(time.monotonic() - began, 4), **sizes)
            return

    def _shard(self, message: dict[str, Any]) -> Shard:
        assert self._area is not None, "a snapshot came before its memory"
        view, layout = memoryview(self._area), self._layout
        boxes = tuple((name, tuple(corner), tuple(extent)) for name, corner, extent in layout["boxes"])
        tensors = {name: TensorMeta(dtype, tuple(shape)) for name, (dtype, shape) in layout["tensors"].items()}
        pieces = tuple(
            Piece(
                _piece_name(boxes[box], start),
                tensors[boxes[box][0]].dtype,
                box,
                start,
                view[offset : offset + length],
                group,
            )
            for box, start, offset, length, group in layout["pieces"]
        )
        return Shard(
            run_id=self._request.run_id,
            ref=ManifestRef(message["step"], self._request.generation),
            rank=self._rank,
            world_size=layout["world_size"],
            tensors=tensors,
            boxes=boxes,
            pieces=pieces,
            local=message["local"],
            head=_whole_head(message["head"], layout["head"]),
            fragment=layout["fragment"],
        )

    def _known_chunks(self, world_size: int) -> KnownChunks:
        """What may be referenced: this rank's last shard; before the first, the checkpoint that the generation began at."""
        if self._known is None:
            begin = self._request.begin
            self._known = KnownChunks()
            with contextlib.suppress(CorruptionError, NotFoundError):  # then everything is uploaded
                if begin is not None:
                    manifest = load_manifest(self._store, self._request.run_id, begin)
                    ranks = [record.rank for record in manifest.records]
                    if len(ranks) > _RECORDS:
                        ranks = [rank for rank in ranks if manifest.world_size == world_size and rank == self._rank]
                    self._known = KnownChunks.of([load_record(self._store, manifest, rank) for rank in ranks])
        return self._known

    def _commit_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._to_commit) or self._stopping)
                if not self._to_commit:
                    return
                ref = self._to_commit[-1]  # a newer complete checkpoint makes older attempts pointless
                self._to_commit.clear()
                self._committing = True
            self._commit(ref)
            with self._changed:
                self._committing = False
                self._changed.notify_all()

    def _commit(self, ref: ManifestRef) -> None:
        polls, retries, began = _backoff(*_POLL_S), _backoff(*_RETRY_S), time.monotonic()
        while True:
            last_look = self._gone_since is not None and not self._siblings_alive()
            try:
                manifest = commit_manifest(self._store, self._request.run_id, ref, partial=last_look)
            except Exception as error:
                if self._report_failure(ref.step, error) or self._pause(next(retries)):
                    return
                continue
            if manifest:
                seconds = round(time.monotonic() - began, 4)
                self._tell("committed", step=ref.step, bytes=manifest.size_bytes, commit_s=seconds)
                return
            with self._changed:
                newer = bool(self._to_commit)
            if newer or last_look:
                _LOG.warning("step=%d is not committed: not all ranks have written it", ref.step)
                self._tell("abandoned", step=ref.step, message="not all ranks wrote their shard")
                return
            if self._pause(next(polls)):
                return

    def _report_failure(self, step: int, error: Exception) -> bool:
        """Report a failed attempt; True if trying again is pointless."""
        final = isinstance(error, FencedError)
        kind = error.kind if isinstance(error, TorchrelayError) else type(error).__name__
        _LOG.warning(
            "rank=%d step=%d save attempt failed: %s",
            self._rank,
            step,
            error,
            exc_info=not isinstance(error, TorchrelayError),
        )
        self._tell("fenced" if final else "failing", step=step, kind=kind, message=str(error)[:800])
        return final

    def _pause(self, seconds: float) -> bool:
        """Wait; True if the courier is stopping."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, timeout=seconds)

    def _siblings_alive(self) -> bool:
        """Whether another courier of this host still runs; only those can add records once the ranks have gone."""
        for rank in range(self._local_ranks):
            if rank == self._rank:
                continue
            try:
                with (self._folder / f"courier-{rank}.lock").open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except FileNotFoundError:
                continue
            except BlockingIOError:
                return True
        return False

    def _lease_forever(self) -> None:
        """Keep the generation's lease where no launcher does; end it when the courier ends."""
        request = self._request
        claim = GenerationClaim(run_id=request.run_id, generation=request.generation, begin=request.begin, fenced=True)
        lease = Lease(self._store, claim, lease_s=request.lease_s)
        step = 0
        while True:
            try:
                lease.renew(step=step)
            except FencedError as error:
                self._tell("fenced", step=step, kind=error.kind, message=str(error))
                return
            except TorchrelayError as error:
                _LOG.warning("lease not renewed: %s", error)
            if self._pause(request.lease_s / 4):
                with contextlib.suppress(TorchrelayError):
                    lease.end(
                        {
                            "kind": "completed",
                            "generation": request.generation,
                            "begin_step": claim.begin_step,
                            "last_step": 0,
                            "committed_step": 0,
                        }
                    )
                return


def _whole_head(head: dict[str, Any] | None, fixed: dict[str, Any] | None) -> dict[str, Any] | None:
    """Join what varies of rank 0's head with what came with the staging area."""
    if head is None or fixed is None:
        return None
    return {**head, "tensors": fixed["tensors"], "state": join_nodes(fixed["state"], head["state"])}


def _piece_name(box: tuple[str, tuple[int, ...], tuple[int, ...]], start: int) -> str:
    """Name of a chunk in its pack: the tensor, the corner of its box unless that is the origin, and the first byte."""
    name, corner, _ = box
    return f"{name}{'[' + ','.join(map(str, corner)) + ']' if any(corner) else ''}@{start}"


def _backoff(first: float, longest: float) -> Iterator[float]:
    while True:
        yield first
        first = min(2 * first, longest)


def main() -> int:
    """Run the courier of the rank named by the environment (see ``launch``)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    # Ctrl-C reaches the whole terminal group; the rank's closed socket says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    folder = Path(os.environ["TORCHRELAY_WORKDIR"])
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    request = GenerationRequest.read(folder)
    with (folder / f"courier-{local}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = folder / f"courier-{local}.sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(2)
            store = open_store(request.store_url)
            courier = Courier(
                request, store=store, folder=folder, rank=rank, local_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            )
            signal.signal(signal.SIGTERM, lambda *_: courier.dismiss())
            courier.serve(listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
