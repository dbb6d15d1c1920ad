"""Writing large payloads to a file past the page cache, where the system can.

A copy of each byte into the page cache costs more CPU time than everything else of a save together, and it is time that training has to do
without. Memory that lies one piece after another at the start of a page goes to the disk from where it is; the rest goes through a
small aligned buffer. Needs O_DIRECT (Linux); elsewhere, and for what is small, it is an ordinary write.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence

import numpy as np

__all__ = ["write_all"]

_WORTH_BYTES = 4 * 2**20
_PAGE = 4096
_BUFFER_BYTES = 2**20
_WRITE_BYTES = 16 * 2**20  # one system call
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def write_all(fd: int, views: Sequence[memoryview]) -> None:
    """Write all bytes to a file that is empty and open for writing. Durable after the caller's fsync. Raises OSError."""
    if sum(map(len, views)) >= _WORTH_BYTES and _switch(fd, on=True):
        try:
            rest = _write_pages(fd, list(_runs(views)))
        finally:
            _switch(fd, on=False)
        _write(fd, rest)
        return
    for view in views:
        _write(fd, view)


def _write_pages(fd: int, runs: Sequence[memoryview]) -> memoryview:
    """Write whole pages; returns the bytes after the last whole page."""
    buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
    held = 0
    for run in runs:
        done = 0
        while done < len(run):
            if held % _PAGE == 0 and len(run) - done >= _PAGE and (_address(run) + done) % _PAGE == 0:
                _write(fd, buffer[:held])
                held = 0
                whole = (len(run) - done) // _PAGE * _PAGE
                _write(fd, run[done : done + whole])
                done += whole
                continue
            count = min(len(run) - done, _BUFFER_BYTES - held)
            buffer[held : held + count] = run[done : done + count]
            held, done = held + count, done + count
            if held == _BUFFER_BYTES:
                _write(fd, buffer)
                held = 0
    whole = held // _PAGE * _PAGE
    _write(fd, buffer[:whole])
    return buffer[whole:held]


def _runs(views: Sequence[memoryview]) -> Iterator[memoryview]:
    """Join views that lie one after another in memory."""
    start = end = 0
    for view in views:
        if not len(view):
            continue
        address = _address(view)
        if address == end:
            end += len(view)
            continue
        if end > start:
            yield _memory(start, end - start)
        start, end = address, address + len(view)
    if end > start:
        yield _memory(start, end - start)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _memory(address: int, size: int) -> memoryview:
    """Bytes at an address; they belong to the views of the payload, which the caller keeps."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def _write(fd: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(fd, view[done : done + _WRITE_BYTES])


def _switch(fd: int, *, on: bool) -> bool:
    """Switch past-the-cache writing on or off; False where the file system has none."""
    if not _O_DIRECT:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:
        return False
    return True
