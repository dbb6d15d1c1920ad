"""The user's wishes as one tree of frozen dataclasses, checked once at the edge.

One definition serves the command line (TOML), the Prefect run form (JSON schema, made by pydantic from these classes and their
field ``metadata``) and the rank process (which needs no pydantic). Everything in ``RunSpec`` is the identity of a run and
never changes; the rest says how it is run today and may differ from start to start. Secrets are never part of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torchrelay.errors import ConfigError

__all__ = [
    "DEFAULT_JOB",
    "FaultSpec",
    "KeepSpec",
    "RunSpec",
    "SaveSpec",
    "TrainSpec",
    "UpkeepSpec",
    "WorldSpec",
    "load_spec",
    "parse_spec",
    "spec_to_dict",
]

DEFAULT_JOB = "torchrelay.jobs.stdlib_gpt:build"
_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")
_T = TypeVar("_T")
_FIRST_INTERVAL_STEPS, _MAX_INTERVAL_STEPS = (
    50,
    1_000_000,
)  # where the interval is chosen: before anything is measured, and at most


# Read by pydantic where it makes the run form from these classes: a field we do not know is refused, not dropped in silence.
_FORM = {"extra": "forbid"}


def _f(position: int, description: str, **schema: object) -> dict[str, object]:
    """Metadata of one field. ``position`` keeps our order in the run form, which otherwise sorts by name."""
    return {"description": description, "json_schema_extra": {"position": position, **schema}}


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """What is trained. Immutable for the life of a run: the same values give the same numbers, bit for bit."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _FORM

    run_id: str = field(
        metadata=_f(1, "Name of the run: lower case letters, digits, dot, dash, underscore; at most 80.")
    )
    job: str = field(
        default=DEFAULT_JOB,
        metadata=_f(2, "Function that builds the job: package.module:function or path/to/file.py:function."),
    )
    options: dict[str, Any] = field(
        default_factory=dict, metadata=_f(3, "Options handed to the job function (JSON values).")
    )
    total_steps: int = field(default=600, metadata=_f(4, "Optimizer steps of the whole run."))
    global_batch: int = field(
        default=16, metadata=_f(5, "Samples per optimizer step over all ranks, whatever their number.")
    )
    seed: int = field(default=0, metadata=_f(6, "Seed of initial weights, data order, dropout and augmentation."))

    def __post_init__(self) -> None:
        _require(
            bool(_RUN_ID.fullmatch(self.run_id)) and ".." not in self.run_id,
            f"run_id {self.run_id[:100]!r} is not usable as a name: use lower case letters, digits, '.', '-' and '_', start with a "
            "letter or digit, at most 80 characters",
        )
        _require(
            bool(re.fullmatch(r"[^:\s]+:[A-Za-z_][A-Za-z0-9_.]*", self.job)),
            f"job {self.job!r} must look like package.module:function or path/to/file.py:function",
        )
        _require(self.total_steps >= 1, "total_steps must be at least 1")
        _require(self.global_batch >= 1, "global_batch must be at least 1")
        _require(0 <= self.seed < 2**63, "seed must be between 0 and 2**63 - 1")
        try:
            json.dumps(self.options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"options must be plain JSON values: {error}") from None

    def digest(self) -> str:
        """SHA-256 (hex) over the canonical JSON of every field: two runs with one digest train the same thing."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSpec:
    """Who trains it: processes and devices of this start. May change from start to start."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _FORM

    ranks: int = field(default=1, metadata=_f(1, "Rank processes on this host (data parallel)."))
    device: str = field(default="cpu", metadata=_f(2, "Device of the ranks.", enum=["cpu", "cuda"]))
    threads_per_rank: int = field(
        default=1, metadata=_f(3, "CPU threads of each rank; other numbers change the last bits.")
    )
    loader_workers: int = field(default=0, metadata=_f(4, "DataLoader worker processes of each rank."))

    def __post_init__(self) -> None:
        _require(1 <= self.ranks <= 4096, "ranks must be between 1 and 4096")
        _require(self.device in ("cpu", "cuda"), f"device must be cpu or cuda, not {self.device!r}")
        _require(self.threads_per_rank >= 1, "threads_per_rank must be at least 1")
        _require(self.loader_workers >= 0, "loader_workers must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSpec:
    """When to save."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _FORM

    interval_steps: int = field(
        default=50,
        metadata=_f(
            1, "Steps between checkpoints; a failure loses at most about this many. 0 = chosen from measured costs."
        ),
    )
    loss_bound_steps: int = field(
        default=0,
        metadata=_f(
            2, "Training stops and waits for the store when this many steps are not committed; 0 = four intervals."
        ),
    )
    upload_mib_s: float = field(
        default=0.0, metadata=_f(3, "Cap on what each rank's courier uploads, in MiB per second; 0 = none.")
    )
    courier_cores: float = field(
        default=0.0, metadata=_f(4, "Cap on the processors each rank's courier uses, such as 0.25; 0 = none.")
    )

    partial_commits: bool = field(
        default=False,
        metadata=_f(
            6,
            "Commit also without the records of dead ranks that held nothing of their own; saves an interval of work, but their RNG is derived anew.",
        ),
    )

    def __post_init__(self) -> None:
        _require(self.upload_mib_s >= 0, "upload_mib_s must not be negative")
        _require(self.courier_cores >= 0, "courier_cores must not be negative")
        _require(self.interval_steps >= 0, "interval_steps must be at least 1, or 0 to have it chosen")
        _require(
            self.loss_bound_steps == 0 or self.loss_bound_steps >= self.interval_steps,
            "loss_bound_steps must be 0 or at least interval_steps",
        )

    @property
    def auto(self) -> bool:
        """The interval is chosen from what saves and failures cost."""
        return self.interval_steps == 0

    @property
    def max_interval_steps(self) -> int:
        """Longest interval that may be chosen: half the loss bound, so that a save is committed before training has to wait for it."""
        return max(1, self.loss_bound_steps // 2) if self.loss_bound_steps else _MAX_INTERVAL_STEPS

    @property
    def first_interval_steps(self) -> int:
        """The interval to begin with; the one and only where it is not chosen."""
        return self.interval_steps or min(_FIRST_INTERVAL_STEPS, self.max_interval_steps)

    def bound_steps(self, interval_steps: int) -> int:
        """Uncommitted steps at which training waits for the store, while it saves every ``interval_steps``."""
        return self.loss_bound_steps or 4 * interval_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepSpec:
    """Which checkpoints are kept. Besides these always: the newest, the one the newest generation began at, and pinned ones."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _FORM

    newest: int = field(
        default=3, metadata=_f(1, "So many of the newest verified checkpoints, and all that is newer than they.")
    )
    every_steps: int = field(default=0, metadata=_f(2, "Those at multiples of so many steps, for ever; 0 = none."))
    ladder_hours: float = field(
        default=24.0,
        metadata=_f(3, "A ladder back in time: each next one at most twice as old as the one before; 0 = none."),
    )

    def __post_init__(self) -> None:
        _require(self.newest >= 1, "newest must be at least 1: a run without a verified checkpoint cannot step back")
        _require(self.every_steps >= 0, "every_steps must not be negative")
        _require(self.ladder_hours >= 0, "ladder_hours must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpkeepSpec:
    """One round of care of the store; the single parameter of the ``upkeep`` flow."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _FORM

    runs: list[str] = field(default_factory=list, metadata=_f(1, "Names of the runs; none: all of the store."))
    keep: KeepSpec = field(default_factory=KeepSpec, metadata=_f(2, "Which checkpoints are kept."))
    verify_at_most: int = field(
        default=8, metadata=_f(3, "Checkpoints of each run that are read back in this round, newest first.")
    )
    grace_hours: float = field(
        default=24.0, metadata=_f(4, "What counts for nobody is deleted when it is older than this.")
    )
    dry_run: bool = field(default=False, metadata=_f(5, "Say what would be forgotten and deleted, and do neither."))
    store: str = field(default="", metadata=_f(6, "Object store. Empty: TORCHRELAY_STORE of the machine that runs it."))

    def __post_init__(self) -> None:
        _require(self.verify_at_most >= 0, "verify_at_most must not be negative")
        _require(self.grace_hours >= 0, "grace_hours must not be negative")
        _require("@" not in self.store, "store must not contain credentials; they come from the environment")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpec:
    """How failures are met. Times in seconds."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _FORM

    lease_s: float = field(default=15.0, metadata=_f(1, "A generation whose lease did not change for so long is dead."))
    start_timeout_s: float = field(default=300.0, metadata=_f(2, "Limit from launch to the first step."))
    collective_timeout_s: float = field(default=120.0, metadata=_f(3, "Limit of one collective operation."))
    grace_s: float = field(default=20.0, metadata=_f(4, "After SIGTERM: time to save, commit and exit."))
    drain_s: float = field(
        default=60.0, metadata=_f(5, "Time the couriers get to finish a snapshot when ranks have gone.")
    )
    max_idle_generations: int = field(
        default=3, metadata=_f(6, "Stop after so many generations in a row that committed no new best step.")
    )
    retry_delay_s: float = field(
        default=1.0, metadata=_f(7, "Wait before the next generation; doubles while nothing is committed.")
    )

    def __post_init__(self) -> None:
        for name in ("lease_s", "start_timeout_s", "collective_timeout_s", "grace_s", "drain_s"):
            _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(self.max_idle_generations >= 1, "max_idle_generations must be at least 1")
        _require(self.retry_delay_s >= 0, "retry_delay_s must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec:
    """Everything one start of a run needs; the single parameter of the ``train`` flow."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _FORM

    run: RunSpec = field(metadata=_f(1, "What is trained; never changes during a run."))
    segment_steps: int = field(default=200, metadata=_f(2, "Optimizer steps of one segment (one retriable task)."))
    world: WorldSpec = field(default_factory=WorldSpec, metadata=_f(3, "Processes and devices of this start."))
    save: SaveSpec = field(default_factory=SaveSpec, metadata=_f(4, "When to save."))
    faults: FaultSpec = field(default_factory=FaultSpec, metadata=_f(5, "How failures are met."))
    store: str = field(
        default="",
        metadata=_f(
            6,
            "Object store: s3://bucket/prefix or file:///folder. Empty: TORCHRELAY_STORE of the machine that runs it.",
        ),
    )

    def __post_init__(self) -> None:
        _require(self.segment_steps >= 1, "segment_steps must be at least 1")
        _require(
            self.world.ranks <= self.run.global_batch,
            f"global_batch {self.run.global_batch} leaves some of {self.world.ranks} ranks without a sample",
        )
        _require("@" not in self.store, "store must not contain credentials; they come from the environment")


def load_spec(path: Path | None, overrides: Mapping[str, Any] | None = None) -> TrainSpec:
    """Read a TrainSpec from a TOML file (None: from the defaults); ``overrides`` maps dotted field names to values and wins.

    Raises ConfigError that names the file, the field, and the nearest valid name.
    """
    tree = _read_toml(path) if path is not None else {}
    for dotted, value in (overrides or {}).items():
        *folders, leaf = dotted.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{folder} in {dotted} is a value, not a table")
        node[leaf] = value
    return parse_spec(tree, where=str(path or "command line"))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no such spec file: {path}", hint="torchrelay train --help shows an example") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def parse_spec(tree: Mapping[str, Any], *, where: str = "spec") -> TrainSpec:
    """Build a TrainSpec from nested plain values (TOML or JSON). Raises ConfigError with the path of the bad field."""
    return _parse(TrainSpec, tree, where)


def spec_to_dict(spec: TrainSpec) -> dict[str, Any]:
    """Return plain JSON values; ``parse_spec`` gives the same spec back."""
    return dataclasses.asdict(spec)


def _parse(cls: type[_T], tree: object, where: str) -> _T:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where} must be a table of {cls.__name__} fields, not {type(tree).__name__}")
    hints = typing.get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in tree:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known fields: {', '.join(sorted(known))}"
            raise ConfigError(f"{where} has an unknown field {str(name)[:100]!r}", hint=hint)
    values = {name: _value(hints[name], value, f"{where}: {name}") for name, value in tree.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value(hint: Any, value: object, where: str) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _parse(hint, value, where)
    wanted = typing.get_origin(hint) or hint
    if wanted is float and type(value) is int:
        return float(value)
    if isinstance(wanted, types.UnionType) or type(value) is not wanted:
        raise ConfigError(
            f"{where} must be of type {wanted.__name__}, not {type(value).__name__} ({str(value)[:60]!r})"
        )
    return value
