"""What a job is, and how the user's function that builds it is found and called.

A job is named ``package.module:function`` or ``path/to/file.py:function``. Whatever is wrong with it ends in one JobError that names
the place in the user's code; trouble that is not the job's fault (memory, network, peers) passes through as it is.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import shlex
import sys
import traceback
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchrelay.data.dataset import DatasetVersion, MapDataset
from torchrelay.errors import JobError, TorchrelayError

if TYPE_CHECKING:
    from torchrelay.state.capture import Stateful

__all__ = ["Job", "JobContext", "build_job", "read_options", "resolve_job"]

_T = TypeVar("_T")
# Not the job's fault: these keep their class, so that the launcher can judge them by what they are.
_PASS_THROUGH = (
    TorchrelayError,
    MemoryError,
    ConnectionError,
    TimeoutError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    dist.DistError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobContext:
    """What a job function is told.

    Before it is called the global generators of Python, NumPy and torch are seeded with ``seed`` on every rank, so that all
    ranks build the same initial weights; so a job that draws numbers must draw the same ones on each rank. ``options`` are the user's own
    JSON values (see ``read_options``). ``device`` is where the model belongs: "cpu" or "cuda:<index>".
    """

    options: Mapping[str, Any]
    total_steps: int
    global_batch: int
    seed: int
    device: str
    rank: int
    world_size: int


@dataclass(kw_only=True)
class Job:
    """Everything a run trains, built anew by the job function at each start and then given its saved state.

    Args:
        model: on its device, not wrapped for data parallelism; the relay does that.
        optimizer: over the model's parameters.
        dataset: map style; its items are what ``collate`` (DataLoader's default if None) makes batches of.
        dataset_version: names the dataset by content.
        loss: ``loss(model, batch)`` runs the forward pass of one batch on the model as it is trained (perhaps wrapped) and returns
            the mean over the samples of the batch.
        scheduler: stepped once after each optimizer step.
        scaler: for float16 training. ema, update_ema: an averaged model, and what updates it after each step.
        extra: further objects to save with the run, the same on every rank, by name.
        max_grad_norm: gradients are scaled down to this norm over all parameters.
        sample: makes a short text out of the trained model, to show what it can do. Must leave model and generators as they were.
    """

    model: nn.Module
    optimizer: Optimizer
    dataset: MapDataset
    dataset_version: DatasetVersion
    loss: Callable[[nn.Module, Any], Tensor]
    scheduler: LRScheduler | None = None
    scaler: GradScaler | None = None
    ema: nn.Module | None = None
    update_ema: Callable[[], None] | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    max_grad_norm: float | None = None
    sample: Callable[[nn.Module], str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {_kind(self.model)}")
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {_kind(self.optimizer)}")
        if not callable(self.loss):
            raise TypeError(f"loss must be a function of (model, batch), not {_kind(self.loss)}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, not {self.max_grad_norm}")
        if len(self.dataset) != self.dataset_version.num_samples:
            raise ValueError(
                f"the dataset has {len(self.dataset)} samples, but its version says {self.dataset_version.num_samples}"
            )


def resolve_job(target: str) -> Callable[[JobContext], Job]:
    """Import the job function named by ``target``; file paths are relative to the current folder.

    Raises JobError: no such module, file or function, not a function, or an error (named with its line) while importing.
    """
    place, _, name = target.rpartition(":")
    is_file = place.endswith(".py") or "/" in place
    if not place or not name or (place.startswith(".") and not is_file):
        raise JobError(
            f"job {target!r} must look like package.module:function or path/to/file.py:function",
            hint="for example torchrelay.jobs.stdlib_gpt:build",
        )
    module = _import_file(Path(place)) if is_file else _import_module(place)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise JobError(f"{place} has no {name!r}", hint=_near(part, found, place)) from None
        except _PASS_THROUGH:
            raise
        except (Exception, SystemExit) as error:  # a module that imports its names when they are asked for
            hint = "mend that line, or install what it needs"
            raise JobError(f"{target} cannot be imported: {_describe(error, None)}", hint=hint) from error
    if not callable(found):
        raise JobError(
            f"{target} is a {_kind(found)}, not a function that builds a job", hint=_functions(module, place)
        )
    return typing.cast(Callable[[JobContext], Job], found)


def build_job(target: str, context: JobContext) -> Job:
    """Find the job function and call it. Raises JobError if it raises, or returns something that is not a Job."""
    function = resolve_job(target)
    try:
        job = function(context)
    except _PASS_THROUGH:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(
            f"{target} raised while it built the job: {_describe(error, function)}",
            hint="the function is called anew at each start: mend that line and start again",
        ) from error
    if not isinstance(job, Job):
        raise JobError(
            f"{target} returned a {_kind(job)}, not a Job", hint="end it with: return torchrelay.Job(model=..., ...)"
        )
    return job


def read_options(kind: type[_T], options: Mapping[str, Any]) -> _T:
    """Make a dataclass of int, float, bool and str fields out of a job's options.

    Raises JobError for an unknown name (with the nearest known one), a wrong type, or a value the class refuses with ValueError.
    """
    known = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if name in known}
    values: dict[str, Any] = {}
    for name, given in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else _types(hints)
            raise JobError(f"unknown option {name!r}", hint=hint)
        wanted = hints[name]
        if isinstance(wanted, type) and type(given) is not wanted and not (wanted is float and type(given) is int):
            shown = f"{_kind(given)} ({str(given)[:60]!r})"
            raise JobError(f"option {name!r} must be of type {wanted.__name__}, not {shown}", hint=_types(hints))
        values[name] = given
    try:
        values = {name: float(value) if hints[name] is float else value for name, value in values.items()}
        return kind(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise JobError(f"options: {error}", hint=_types(hints)) from error


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except _PASS_THROUGH:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise _import_failed(name, error, name) from error
        hint = f"install it, or start from the folder that holds it (now {Path.cwd()})"
        raise JobError(f"there is no module {error.name!r}, which job {name} needs", hint=hint) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error, name) from error


def _import_failed(what: str, error: BaseException, place: str) -> JobError:
    """Say where it failed, and how to see the rest."""
    if place.endswith(".py") and "relative import" in str(error):
        hint = "a job file is part of no package: `import name` finds a file beside it; or name the job package.module:function"
    else:
        code = shlex.quote(place) if place.endswith(".py") else f"-c {shlex.quote(f'import {place}')}"
        hint = f"the whole traceback: python {code}"
    return JobError(f"{what} cannot be imported: {_describe(error, None)}", hint=hint)


def _job_file(given: Path) -> Path:
    try:
        path = given.expanduser().resolve()
        if path.suffix != ".py":
            raise JobError(
                f"job file {given} must end in .py", hint="name a file of Python, or package.module:function"
            )
        if path.is_file():
            return path
        near = difflib.get_close_matches(path.name, [item.name for item in path.parent.glob("*.py")], n=1)
    except (RuntimeError, ValueError, OSError) as error:
        # No such home, a circle of links, a forbidden folder, or no path at all.
        raise JobError(f"job file {given} cannot be found: {error}", hint="check the path") from error
    hint = f"did you mean {given.parent / near[0]}?" if near else f"paths are relative to {Path.cwd()}"
    raise JobError(f"there is no job file {given}", hint=hint)


def _import_file(given: Path) -> ModuleType:
    path = _job_file(given)
    # One name per path: two files called train.py are two modules, and one file is imported once.
    name = f"torchrelay_job_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and workers of the job look it up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that its neighbours can be imported but hide nothing
    try:
        spec.loader.exec_module(module)
    except _PASS_THROUGH:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(str(given), error, str(given)) from error
    return module


def _describe(error: BaseException, function: Callable[..., Any] | None) -> str:
    """Name an error with the innermost line of the user's code it came through."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text  # names file and line itself
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    inside = [frame for frame in frames if frame.filename == own] or [f for f in frames if f.filename != __file__]
    return f"{text} ({inside[-1].filename}, line {inside[-1].lineno})" if inside else text


def _near(name: str, holder: object, place: str) -> str:
    public = [item for item in dir(holder) if not item.startswith("_")]
    near = difflib.get_close_matches(name, public, n=3)
    if near:
        return f"did you mean {' or '.join(repr(item) for item in near)}?"
    return _functions(holder, place)


def _functions(holder: object, place: str) -> str:
    public = {item: getattr(holder, item) for item in dir(holder) if not item.startswith("_")}
    functions = {item: value for item, value in public.items() if callable(value) and not isinstance(value, type)}
    home = getattr(holder, "__name__", "")
    own = [item for item, value in functions.items() if getattr(value, "__module__", "") == home]
    return f"functions of {place}: {', '.join(own[:8])}" if own else f"{place} defines no function"


def _types(hints: Mapping[str, Any]) -> str:
    shown = (f"{name} ({getattr(kind, '__name__', kind)})" for name, kind in sorted(hints.items()))
    return f"known options: {', '.join(shown)}"


def _kind(value: object) -> str:
    return type(value).__name__
