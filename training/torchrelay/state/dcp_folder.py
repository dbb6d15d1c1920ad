"""Folders of ``torch.distributed.checkpoint`` on a local disk, written and read without running anybody's code.

DCP keeps its metadata as a pickle. Before it is opened, its instructions are looked through: only those by which DCP's own plain records are
built, and only the names of these, may occur. Values are read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import os
import pickletools
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from torchrelay.checkpoint.layout import DTYPES
from torchrelay.errors import ConfigError

__all__ = ["problem_of_metadata", "read_folder", "write_folder"]

_RECORDS = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
_NAMES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _RECORDS.split()),
    *(("torch", name) for name in ("Size", *DTYPES)),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
}
_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE"}
_GETS = {"BINGET", "LONG_BINGET"}
_PLAIN = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND "
    "APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS NEWOBJ REDUCE BUILD"
)
_OTHERS = set(_PLAIN.split())


def problem_of_metadata(data: bytes) -> str:
    """Say what in DCP's metadata is not plain; empty if it can be opened.

    A name is made of the two strings that were put on the stack just before it, so it is known without running anything; what would allow to
    name things in any other way is not allowed.
    """
    memo: list[str | None] = []
    recent: list[str | None] = []  # what the last instructions put on the stack, if it was strings
    try:
        for op, arg, _ in pickletools.genops(data):
            if op.name == "MEMOIZE":
                memo.append(recent[-1] if recent else None)
                continue
            if op.name == "STACK_GLOBAL":
                if len(recent) < 2 or (recent[-2], recent[-1]) not in _NAMES:
                    return f"it names {'.'.join(map(str, recent[-2:]))}"
                recent = [None]
            elif op.name in _STRINGS:
                recent = [*recent[-1:], str(arg)]
            elif op.name in _GETS:
                recent = [*recent[-1:], memo[int(str(arg))]]
            elif op.name in _OTHERS:
                recent = [None]
            else:
                return f"it holds the instruction {op.name}"
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        return f"it is damaged: {error}"
    return ""


class _PlainPlanner(_EmptyStateDictLoadPlanner):
    """Loads everything there is, values without running code."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one value."""
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_folder(folder: Path) -> dict[str, Any]:
    """Read a whole checkpoint of DCP into host memory. Raises ConfigError if it is not one, or not plain data."""
    metadata = folder / ".metadata"
    if not metadata.is_file():
        raise ConfigError(f"{folder} is no checkpoint of torch.distributed.checkpoint: it has no .metadata")
    problem = problem_of_metadata(metadata.read_bytes())
    if problem:
        raise ConfigError(
            f"{metadata} is refused: {problem}", hint="only plain data is read, nothing that could run code"
        )
    state: dict[str, Any] = {}
    planner = _PlainPlanner()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _load_state_dict(state, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)
    flat = {**planner.state_dict, **planner.values}
    return unflatten_state_dict(flat, planner.mappings)


def write_folder(state: dict[str, Any], folder: Path) -> None:
    """Write a state dict as a checkpoint of DCP. The folder appears only when it is complete; one that is there is replaced."""
    part = folder.with_name(f".{folder.name}.part-{os.getpid()}")
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=dcp.FileSystemWriter(part), no_dist=True)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from None
    except dcp.CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        raise ConfigError(f"cannot write {folder}: {failure}") from None
    finally:
        for left in (part, old):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
