"""The staging area: warm shared memory that a snapshot is copied into, and that the courier reads from.

It is anonymous memory passed by file descriptor: nothing to clean up, and it lives as long as the rank or the courier does. Its pages
are touched once when it is made, because the first touch costs several times the copy. Tensors in host memory are copied as bytes by one
thread that does not hold the interpreter's lock; tensors on a device by its own stream, into memory that it has been told of.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from torchrelay.checkpoint.layout import DTYPES
from torchrelay.checkpoint.manifest import TensorMeta
from torchrelay.state.shards import ShardPlan, Slice

__all__ = ["StagingArea"]


_MADV_COLLAPSE = 25  # Linux 6.1 and newer


class StagingArea:
    """One rank's staging memory, laid out for one plan."""

    def __init__(self, plan: ShardPlan, tensors: Mapping[str, TensorMeta]) -> None:
        self.size_bytes = plan.area_bytes
        self.fd = _anonymous(plan.area_bytes)
        self._map = mmap.mmap(self.fd, plan.area_bytes)
        pages = np.frombuffer(self._map, np.uint8)
        pages[:] = 0  # touch every page now, not during the first save
        with contextlib.suppress(OSError):  # large pages, where the kernel has them: a few per cent of every copy
            self._map.madvise(_MADV_COLLAPSE)
        self._address = pages.ctypes.data
        self._spans: dict[str, list[Slice]] = {}
        for part in plan.slices:
            spans = self._spans.setdefault(part.tensor, [])
            last = spans[-1] if spans else None
            if last and (last.start + last.length, last.offset + last.length) == (part.start, part.offset):
                spans[-1] = replace(last, length=last.length + part.length)
            else:
                spans.append(part)
        self._dtypes = {name: tensors[name].dtype for name in self._spans}
        self._device = _Device(self._address, self.size_bytes)

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what is staged of each tensor; when this returns the bytes are in host memory."""
        elsewhere = []
        for name, spans in self._spans.items():
            source = tensors[name]
            if source.device.type == "cpu" and source.is_contiguous() and not (source.is_conj() or source.is_neg()):
                address = source.data_ptr()
                for span in spans:
                    # A foreign call: the interpreter's lock is free while the bytes move.
                    ctypes.memmove(self._address + span.offset, address + span.start, span.length)
            else:
                elsewhere.append(name)
        if elsewhere:
            with self._device.copying(tensors[elsewhere[0]]) as non_blocking, torch.no_grad():
                for name in elsewhere:
                    self._copy_elements(tensors[name], name, non_blocking=non_blocking)

    def close(self) -> None:
        """Let go of the memory on this side; the courier's mapping stays."""
        self._device.close()
        self._spans.clear()
        os.close(self.fd)

    def _copy_elements(self, source: torch.Tensor, name: str, *, non_blocking: bool) -> None:
        item = DTYPES[self._dtypes[name]][1]
        flat = source.reshape(-1)
        for span in self._spans[name]:
            count = span.length // item
            target = torch.frombuffer(self._map, dtype=flat.dtype, count=count, offset=span.offset)
            target.copy_(flat[span.start // item : span.start // item + count], non_blocking=non_blocking)


class _Device:
    """Copies from a CUDA device: a stream of its own, after all that the training thread has queued so far, into registered memory."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self._address, self._size_bytes = address, size_bytes
        self._registered = False
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def copying(self, example: torch.Tensor) -> Iterator[bool]:
        """Run the copies inside; yields whether they may be asynchronous. All are complete when the block ends."""
        if example.device.type != "cuda":
            yield False
            return
        with torch.cuda.device(example.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                self._registered = int(runtime.cudaHostRegister(self._address, self._size_bytes, 0)) == 0
            # The default stream orders after everything that training has queued on it.
            self._stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(self._stream):
                yield self._registered
            self._stream.synchronize()

    def close(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]
            self._registered = False


def _anonymous(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("torchrelay-staging", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
