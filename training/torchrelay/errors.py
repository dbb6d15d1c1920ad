"""Every error of torchrelay, grouped by what the handler does about it.

    TorchrelayError
    ├── RetryableError            try again, later or elsewhere; nothing is lost
    │   ├── StoreUnavailableError     refused, reset, timed out, 5xx, slow down
    │   └── StorageFullError          no space left, quota reached
    ├── CorruptionError           bytes are not what was written; step back to an older checkpoint
    ├── ConflictError             somebody else owns this; stop, never retry blindly
    │   ├── RunMismatchError          the run exists with another spec
    │   ├── RunBusyError              another generation of the run is alive
    │   └── FencedError               a newer generation exists; this one must stop
    ├── ConfigError               the user must change something
    │   ├── StoreAccessError          credentials refused, bucket missing
    │   ├── JobError                  the job function is missing or raised while building
    │   ├── StateMismatchError        checkpoint and program disagree on names, shapes or dtypes
    │   └── UnserialisableError       an object in the state has no typed encoding
    ├── NotFoundError             no such object, run or checkpoint
    └── StoppedError              a budget is spent: no progress, or the same fault again

Each class has a stable ``kind`` (for logs, tables and exit reports) and an ``exit_code``; each error may carry a ``hint``
that says what to run next. Messages never contain credentials.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ConfigError",
    "ConflictError",
    "CorruptionError",
    "FencedError",
    "JobError",
    "NotFoundError",
    "RetryableError",
    "RunBusyError",
    "RunMismatchError",
    "StateMismatchError",
    "StoppedError",
    "StorageFullError",
    "StoreAccessError",
    "StoreUnavailableError",
    "TorchrelayError",
    "UnserialisableError",
]


class TorchrelayError(Exception):
    """Base of all errors raised on purpose by this library."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  hint: {self.hint}" if self.hint else message


class RetryableError(TorchrelayError):
    """The call may succeed later; the state of the world is unchanged or idempotently changed."""

    kind = "retryable"
    exit_code = 75  # EX_TEMPFAIL


class StoreUnavailableError(RetryableError):
    """The store did not answer, or asked us to come back later.

    ``retry_after_s`` is the server's own wish, where it sent one.
    """

    kind = "store-unavailable"

    def __init__(self, message: str, *, hint: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class StorageFullError(RetryableError):
    """No space is left where the bytes should go."""

    kind = "storage-full"


class CorruptionError(TorchrelayError):
    """Bytes read back do not match the digest, size or format they were written with."""

    kind = "corruption"
    exit_code = 65  # EX_DATAERR


class ConflictError(TorchrelayError):
    """Somebody else holds what was asked for."""

    kind = "conflict"
    exit_code = 73


class RunMismatchError(ConflictError):
    """The run id is taken by a run with another spec."""

    kind = "run-mismatch"


class RunBusyError(ConflictError):
    """Another generation of this run is alive."""

    kind = "run-busy"


class FencedError(ConflictError):
    """A newer generation exists, or the lease of this one has lapsed."""

    kind = "fenced"


class ConfigError(TorchrelayError):
    """The user's input cannot be used as it is."""

    kind = "config"
    exit_code = 78  # EX_CONFIG


class StoreAccessError(ConfigError):
    """The store answered, and refused: wrong credentials, missing bucket, no permission."""

    kind = "store-access"


class JobError(ConfigError):
    """The job function cannot be imported, or raised while it built the job."""

    kind = "job"


class StateMismatchError(ConfigError):
    """The checkpoint does not fit the program: names, shapes or dtypes differ."""

    kind = "state-mismatch"


class UnserialisableError(ConfigError):
    """An object in the training state has no typed encoding; it is refused at save time, never pickled."""

    kind = "unserialisable"


class NotFoundError(TorchrelayError):
    """There is no such object, run or checkpoint."""

    kind = "not-found"
    exit_code = 66  # EX_NOINPUT


class StoppedError(TorchrelayError):
    """The run was stopped because going on would repeat the same failure."""

    kind = "stopped"
    exit_code = 70
