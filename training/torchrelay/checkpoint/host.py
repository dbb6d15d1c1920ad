"""Who and where this process is: enough for a successor on the same host to know at once that it is gone."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["ProcessIdentity", "this_process"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """Host name, boot, pid namespace, pid and start tick: together they name one process once and for all."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> ProcessIdentity | None:
        """Read an identity; None if it is not one."""
        try:
            return cls(**{name: body[name] for name in ("host", "boot", "namespace", "pid", "started")})
        except (KeyError, TypeError):
            return None

    def is_gone(self) -> bool:
        """Whether the process is known to have ended. False when it lives, or when this host cannot tell."""
        here = this_process()
        if not self.boot or (self.host, self.boot, self.namespace) != (here.host, here.boot, here.namespace):
            return False
        return _start_tick(self.pid) != self.started


def this_process(pid: int | None = None, *, host: str = "") -> ProcessIdentity:
    """Identify the calling process, or another one of this host."""
    number = os.getpid() if pid is None else pid
    return ProcessIdentity(
        host=host or socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id"),
        namespace=_namespace(),
        pid=number,
        started=_start_tick(number),
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_tick(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 if there is none, or only its zombie."""
    stat = _read(f"/proc/{pid}/stat")
    if not stat:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in ("Z", "X") else int(fields[19])
