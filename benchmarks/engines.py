"""Checkpoint engines behind one seam, so that one loop measures them all: torchrelay, four modes of DCP, torch_checkpointing, torchsnapshot.

Every engine writes to a folder of the same disk and syncs it; ``join`` is what its rules demand before the optimizer may change the state.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.workload import Workload
from torchrelay import Checkpointer, PendingCheckpoint, TrainingState

__all__ = ["ENGINES", "Engine", "process_group"]


class Engine(Protocol):
    """One way to save. ``save`` and ``join`` run on the training thread."""

    name: str

    def save(self, step: int) -> None:
        """Begin (or do) one save."""

    def join(self) -> None:
        """Wait until the state may be changed."""

    def durable_at(self) -> float | None:
        """Time (``time.perf_counter``) at which the save was durable; None if it is not yet. Raises what made it fail."""

    def wait(self) -> None:
        """Wait until every save that was begun is durable."""

    def tidy(self) -> None:
        """Remove what was written, outside of what is measured."""

    def close(self) -> None:
        """Let go of buffers and processes."""


class _Stamped:
    """A save in the background whose end is stamped at once."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._at: float | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(wait,), daemon=True)
        self._thread.start()

    def _run(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except BaseException as error:  # handed to whoever asks
            self._error = error
        self._at = time.perf_counter()

    def at(self) -> float | None:
        if self._error is not None:
            raise self._error
        return self._at

    def join(self) -> None:
        self._thread.join()


class _Background:
    """What engines with a folder per checkpoint and a background save share."""

    name = ""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._workload, self._folder = workload, folder / self.name
        self._folder.mkdir(parents=True)
        self._stamps: list[_Stamped] = []

    def track(self, wait: Callable[[], object]) -> None:
        """Stamp the end of the save that was just begun; ``wait`` returns then."""
        self._stamps.append(_Stamped(wait))

    def path(self, step: int) -> Path:
        return self._folder / str(step)

    def join(self) -> None:
        """Nothing: the call has copied."""

    def durable_at(self) -> float | None:
        return self._stamps[-1].at()

    def wait(self) -> None:
        for stamp in self._stamps:
            stamp.join()
            stamp.at()
        del self._stamps[:-1]

    def tidy(self) -> None:
        for path in self._folder.iterdir():
            shutil.rmtree(path)

    def close(self) -> None:
        """Nothing is kept."""


class Torchrelay(_Background):
    """Our Checkpointer on a local file store; the optimizer's hook joins by itself."""

    name = "torchrelay"
    options: ClassVar[dict[str, Any]] = {}
    """More keyword arguments for the Checkpointer, for instance to cap its courier."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        super().__init__(workload, folder)
        state = TrainingState(model=workload.model, optimizer=workload.optimizer)
        self._checkpointer = Checkpointer(state, run="bench", store=f"file://{self._folder}", **self.options)
        self._checkpointer.restore()
        self.pending: PendingCheckpoint | None = None

    def save(self, step: int) -> None:
        self.pending = pending = self._checkpointer.save(step)
        self.track(pending.result)

    def wait(self) -> None:
        """A save that a newer one overtakes before its commit ends with an error, by design: the newest counts."""
        del self._stamps[:-1]
        super().wait()

    def tidy(self) -> None:
        """Remove the packs; the records that name them are small."""
        shutil.rmtree(self._folder / "runs" / "bench" / "packs")

    def close(self) -> None:
        self._checkpointer.close()


class _Dcp(_Background):
    """``dcp.async_save``; ``options`` None means as documented: no stager given, the copy is made anew in the call."""

    options: StagingOptions | None = None
    executor = AsyncCheckpointerType.THREAD

    def __init__(self, workload: Workload, folder: Path) -> None:
        super().__init__(workload, folder)
        self._stager = DefaultStager(self.options) if self.options else None
        self._staged: Future[Any] | None = None

    def save(self, step: int) -> None:
        answer: Any = async_save(
            self._workload.state_dict(),
            checkpoint_id=self.path(step),
            async_checkpointer_type=self.executor,
            async_stager=self._stager,
        )
        durable = getattr(answer, "upload_completion", answer)
        self._staged = getattr(answer, "staging_completion", None)
        self.track(durable.result)

    def join(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def _staging(*, shared: bool, background: bool) -> StagingOptions:
    return StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=shared,
        use_async_staging=background,
        use_non_blocking_copy=False,
    )


class DcpDocumented(_Dcp):
    """As the documentation shows it: thread, default stager."""

    name = "dcp"


class DcpKept(_Dcp):
    """One stager kept for all saves: warm buffers."""

    name = "dcp-kept"
    options = _staging(shared=False, background=False)


class DcpStaging(_Dcp):
    """Kept stager that copies in the background, thread."""

    name = "dcp-staging"
    options = _staging(shared=False, background=True)


class DcpProcess(_Dcp):
    """DCP at its best here: kept stager, shared memory, copy in the background, another process writes."""

    name = "dcp-process"
    options = _staging(shared=True, background=True)
    executor = AsyncCheckpointerType.PROCESS


class TorchCheckpointing(_Background):
    """torch_checkpointing with the options it documents for a machine without CUDA; its direct I/O cannot write to ext4 and is off."""

    name = "torch_checkpointing"

    def __init__(self, workload: Workload, folder: Path) -> None:
        super().__init__(workload, folder)
        from torch_checkpointing.checkpoint_manager import CheckpointManager
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(staging_config=staging),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, step: int) -> None:
        future: Any = self._manager.save(str(self.path(step)), self._workload.state_dict())

        def durable() -> None:
            future.result()
            _sync(self.path(step))

        self.track(durable)

    def join(self) -> None:
        with self._manager.lock():
            pass

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a save that failed was reported already
            self._manager.close()


class _State:
    """What torchsnapshot asks of an object, around a plain state dict."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict


class Torchsnapshot(_Background):
    """``torchsnapshot.Snapshot.async_take``, synced afterwards because it does not sync by itself."""

    name = "torchsnapshot"

    def save(self, step: int) -> None:
        import torchsnapshot

        pending = torchsnapshot.Snapshot.async_take(str(self.path(step)), {"app": _State(self._workload.state_dict())})

        def durable() -> None:
            pending.wait()
            _sync(self.path(step))

        self.track(durable)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


ENGINES: dict[str, Callable[[Workload, Path], Engine]] = {
    kind.name: kind
    for kind in (Torchrelay, DcpDocumented, DcpKept, DcpStaging, DcpProcess, TorchCheckpointing, Torchsnapshot)
}


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A group of one rank, which DCP's process mode needs; the process that it leaves behind is ended."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            _end_dcp_process()
            dist.destroy_process_group()


def _end_dcp_process() -> None:
    from torch.distributed.checkpoint import _async_process_executor as executor

    process = executor._CHECKPOINT_PROCESS
    executor._CHECKPOINT_PROCESS = None
    if process is not None:
        process._save_process.terminate()
        process._save_process.join()
