"""Background processes of this machine: started in sessions of their own, written down, found again, and stopped with their group."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrelay.attempt import default_sigint
from torchrelay.checkpoint.host import ProcessIdentity, this_process
from torchrelay.cli.console import say
from torchrelay.errors import TorchrelayError

__all__ = ["Books", "Service", "await_ready", "ensure", "stop", "write_private"]

_READY_S = 120.0
_MAX_LOG_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One background process. ``ready`` is asked until it says yes; ``stop_s`` is the time it has after SIGTERM."""

    name: str
    command: list[str]
    environ: dict[str, str]
    ready: Callable[[], bool]
    where: str
    cwd: Path
    stop_s: float

    @property
    def digest(self) -> str:
        """Changes when it would be started otherwise than the one that runs."""
        known = {**self.environ, "command": self.command, "cwd": str(self.cwd)}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


class Books:
    """The processes of one folder, by service."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def process(self, name: str) -> ProcessIdentity | None:
        """Return the live process of a service."""
        body = self._read(name)
        identity = ProcessIdentity.from_dict(body)
        if identity is None or identity.is_gone():
            return None
        here = this_process()
        # Another host, boot or container wrote this into a shared folder: not ours to judge, and surely not running here.
        return identity if (identity.boot, identity.namespace) == (here.boot, here.namespace) else None

    def digest(self, name: str) -> str:
        """Return how the running process was started."""
        return str(self._read(name).get("digest", ""))

    def remember(self, service: Service, pid: int) -> None:
        """Write down a process."""
        body = {**this_process(pid).to_dict(), "digest": service.digest}
        write_private(self._pid_file(service.name), json.dumps(body))

    def forget(self, name: str) -> None:
        """Take a process off the books."""
        self._pid_file(name).unlink(missing_ok=True)

    def log(self, name: str) -> Path:
        """Where a service's output goes."""
        return self._home / "logs" / f"{name}.log"

    def _pid_file(self, name: str) -> Path:
        return self._home / "pids" / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any]:
        try:
            body = json.loads(self._pid_file(name).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}


def ensure(books: Books, service: Service) -> bool:
    """Start a service unless it runs as it should; returns whether it was started."""
    process = books.process(service.name)
    if process is not None:
        if books.digest(service.name) == service.digest:
            return False
        say(f"{service.name} runs with other settings: it is started again")
        stop(process, service.stop_s)
    log = books.log(service.name)
    if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    say(f"starting {service.name}")
    with log.open("ab") as output, default_sigint():
        child = subprocess.Popen(
            service.command,
            env={**_clean_environ(), **service.environ},
            cwd=service.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    books.remember(service, child.pid)
    return True


def await_ready(books: Books, service: Service) -> None:
    """Return when the service works. Raises TorchrelayError with the end of its log if it fell or takes too long."""
    deadline = time.monotonic() + _READY_S
    while not service.ready():
        hint = f"its log: {books.log(service.name)}"
        if books.process(service.name) is None:
            raise TorchrelayError(f"{service.name} ended while starting:\n{_tail(books.log(service.name))}", hint=hint)
        if time.monotonic() > deadline:
            raise TorchrelayError(f"{service.name} is not ready after {_READY_S:.0f} s", hint=hint)
        time.sleep(0.1)


def stop(process: ProcessIdentity, patience_s: float) -> None:
    """SIGTERM to the group, then SIGKILL when the time is over. Each service is its own session, so nobody else is hit."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while _group_lives(process.pid):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        _reap(process.pid)
        time.sleep(0.05)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # usually the child of an earlier `up`
        os.waitpid(pid, os.WNOHANG)


def _clean_environ() -> dict[str, str]:
    """Return the environment without settings of another Prefect server, and without keys that a service has no use for."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "AWS_")) and name not in ("TORCHRELAY_ACCESS_KEY", "TORCHRELAY_SECRET_KEY")
    }


def write_private(path: Path, text: str) -> None:
    """Replace a file in one move; only its owner may read it."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
    except OSError:
        return ""
