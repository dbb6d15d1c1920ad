"""Child processes in groups of their own, watched by pidfd, and ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Child", "oom_kills", "spawn"]


class Child:
    """One rank or courier. ``code`` is None while it runs; negative codes are signals."""

    def __init__(self, role: str, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.role, self.rank, self._process = role, rank, process
        self.pidfd = os.pidfd_open(process.pid)
        self.ours = False
        """The launcher has sent it SIGKILL."""

    @property
    def pid(self) -> int:
        """Process id, also its process group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, if it has ended."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        if self.code is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the whole group: also what the process has started, and also when the process itself is gone."""
        if self.code is None:
            self.ours = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self, timeout_s: float = 10.0) -> int:
        """Wait for a killed process and close its pidfd; returns the code."""
        code = self._process.wait(timeout_s)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        return code

    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP, a debugger): it will not answer a polite request."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] in (
                "T",
                "t",
            )
        except OSError:
            return False


def spawn(
    role: str, rank: int, command: Sequence[str], *, environ: Mapping[str, str], log: Path, pass_fds: Sequence[int] = ()
) -> Child:
    """Start a child in its own process group, its output appended to ``log``, signals as a fresh process has them."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            pass_fds=tuple(pass_fds),
            restore_signals=True,
        )
    return Child(role, rank, process)


def oom_kills(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Count the kernel's out-of-memory kills in this process's cgroup so far (version 2 and 1); 0 where it cannot be read."""
    try:
        lines = own.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folder = root / path.lstrip("/") if not controllers else root / "memory" / path.lstrip("/")
        if controllers and "memory" not in controllers.split(","):
            continue
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                for row in (folder / name).read_text(encoding="ascii").splitlines():
                    if row.startswith("oom_kill "):
                        return int(row.split()[1])
    return 0
