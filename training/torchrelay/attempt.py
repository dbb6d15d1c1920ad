"""One attempt of a segment: the launcher as a child process, watched without a thread or a task of our own.

Shared by the Prefect task and the command line. Whatever happens to the caller (an exception, a cancellation, SIGTERM), the launcher is asked to
stop, given the time to commit, and killed with its group if it does not; if the caller is killed outright, its end of the launcher's stdin
closes and the launcher stops by itself. Must not import torch or the orchestrator.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torchrelay.config import TrainSpec, spec_to_dict
from torchrelay.relay import FINAL_KINDS, Outcome, Retry, RunStatus, Stop, judge

__all__ = ["Attempt", "Event", "Judge", "default_sigint", "restored_line"]

Event = Mapping[str, Any]

_MAX_LINE_BYTES = 1 << 20
_SLACK_S = 10.0  # beyond grace_s and drain_s, for the launcher's own clean-up
_LAST_WORDS = 8  # stderr lines that go into the message when a launcher dies without an outcome


@dataclass(kw_only=True, slots=True)
class Attempt:
    """Runs the launcher once. ``on_event`` and ``on_log`` are called on the event loop and must return at once.

    ``why`` is recorded with the generation; ``origin`` names the flow run or command that started it, and budgets count per origin.
    """

    spec: TrainSpec
    stop_step: int
    origin: str
    why: str
    on_event: Callable[[Event], None]
    on_log: Callable[[str], None]
    environ: Mapping[str, str] | None = None
    command: Sequence[str] = (sys.executable, "-m", "torchrelay.launch")
    _launcher: _Launcher | None = None
    _stopping: bool = False

    async def run(self) -> Outcome:
        """Start the launcher and return how its generation ended. Cancelling this stops the launcher first."""
        launcher = _Launcher(self.on_event, self.on_log)
        loop = asyncio.get_running_loop()
        with default_sigint():
            await loop.subprocess_exec(
                lambda: launcher,
                *self.command,
                env=dict(os.environ if self.environ is None else self.environ),
                start_new_session=True,
            )
        self._launcher = launcher
        try:
            launcher.send(self._request())
            if self._stopping:
                launcher.signal(signal.SIGTERM)
            await launcher.ended.wait()
        finally:
            await launcher.stop(self.patience_s)
        return launcher.outcome()

    def request_stop(self) -> None:
        """Ask the launcher to commit and stop; ``run`` returns its outcome when it has."""
        self._stopping = True
        if self._launcher is not None:
            self._launcher.signal(signal.SIGTERM)

    @property
    def patience_s(self) -> float:
        """How long a launcher may take to stop: save and commit, let the couriers finish, clean up."""
        return self.spec.faults.grace_s + self.spec.faults.drain_s + _SLACK_S

    def _request(self) -> bytes:
        body = {
            "spec": spec_to_dict(self.spec),
            "stop_step": self.stop_step,
            "origin": self.origin,
            "why": self.why,
        }
        return json.dumps(body).encode() + b"\n"


class _Launcher(asyncio.SubprocessProtocol):
    """The launcher's pipes as callbacks: they go on being read while the caller's tasks are cancelled, so that it never blocks on them."""

    def __init__(self, on_event: Callable[[Event], None], on_log: Callable[[str], None]) -> None:
        self._on_event, self._on_log = on_event, on_log
        self._pipes = {1: _Lines(self._event_line), 2: _Lines(self._log_line)}
        self._open = {1, 2}
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._generation = self._begin = self._step = self._committed = 0
        self._outcome: Outcome | None = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)

    def send(self, line: bytes) -> None:
        """Write the request. Stdin then stays open: its end is how the launcher learns that we are gone."""
        stdin = self._transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(line)

    def signal(self, number: int) -> None:
        """Send a signal to the launcher, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            self._transport.send_signal(number)

    async def stop(self, patience_s: float) -> None:
        """Return when the launcher is gone: by itself, by SIGTERM, or killed with its group when its time is over."""
        if not self.ended.is_set():
            self.signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), patience_s)
        if self._transport.get_returncode() is None:
            # The group of its own session: itself and whatever it has not stopped. A launcher that ended leaves couriers that still have
            # a snapshot to write; they end by themselves and are not touched.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._transport.get_pid(), signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ended.wait(), _SLACK_S)
        self._transport.close()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._pipes[fd].feed(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        self._check_end()

    def process_exited(self) -> None:
        # Whatever it has started may still hold its pipes; what it wrote itself is in them already.
        asyncio.get_running_loop().call_later(1.0, self.ended.set)
        self._check_end()

    def _check_end(self) -> None:
        if not self._open and self._transport.get_returncode() is not None:
            self.ended.set()

    def outcome(self) -> Outcome:
        """What the launcher reported, or what can be said when it died without a word."""
        code = self._transport.get_returncode()
        if self._outcome is not None:
            return self._outcome
        ending = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        words = "".join(f"\n  {line}" for line in self._last_words)
        return Outcome(
            kind="killed" if self._generation else "startup",
            generation=self._generation,
            begin_step=self._begin,
            last_step=self._step,
            committed_step=self._committed,
            message=f"the launcher {ending} without an outcome{words}",
        )

    def _event_line(self, line: str) -> None:
        try:
            event = json.loads(line)
            name = event["event"]
            if name == "outcome":
                self._outcome = Outcome.from_dict(event)
            elif name == "generation":
                self._generation, self._begin = int(event["generation"]), int(event["begin_step"])
                self._step = self._committed = self._begin
            elif name == "progress":
                self._step = max(self._step, int(event["step"]))
            elif name == "saved" and event["state"] == "committed":
                self._committed = max(self._committed, int(event["step"]))
        except (ValueError, KeyError, TypeError):
            self._log_line(line)  # something printed to stdout that is no event of ours
            return
        self._on_event(event)

    def _log_line(self, line: str) -> None:
        self._last_words.append(line[:500])
        self._on_log(line)


def restored_line(event: Event) -> str:
    """Say what a generation has loaded."""
    size = float(event.get("size_bytes", 0)) / 2**20
    return f"restored step {event.get('step')} ({size:.1f} MiB, every chunk verified) in {event.get('seconds')} s"


class _Lines:
    """Cuts a byte stream into lines; an overlong one is cut, its rest dropped. Undecodable bytes are replaced."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit, self._part = emit, bytearray()

    def feed(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._extend(piece)
            text = self._part.decode("utf-8", "replace").rstrip("\r")
            self._part.clear()
            if text:
                self._emit(text)
        self._extend(rest)

    def _extend(self, piece: bytes) -> None:
        self._part += piece[: max(0, _MAX_LINE_BYTES - len(self._part))]


@dataclass(kw_only=True, slots=True)
class Judge:
    """``relay.judge`` for one origin, and the starts that got no generation record (store away, launcher killed at once), which it cannot see."""

    spec: TrainSpec
    origin: str
    _unrecorded: int = 0

    def decide(self, status: RunStatus, outcome: Outcome) -> Retry | Stop:
        """Decide what follows ``outcome``; ``status`` was read after it."""
        if outcome.kind in FINAL_KINDS or outcome.generation in {item.number for item in status.generations}:
            self._unrecorded = 0
            # What the couriers committed after the launcher's last word counts as progress too.
            if outcome.generation and status.committed_step > outcome.committed_step:
                outcome = replace(outcome, committed_step=status.committed_step)
            return judge(self.spec, status.generations, outcome, origin=self.origin)
        return self.unrecorded(outcome.message, outcome.hint)

    def unrecorded(self, message: str, hint: str = "") -> Retry | Stop:
        """Decide after a start that left no trace in the store."""
        self._unrecorded += 1
        faults = self.spec.faults
        if self._unrecorded >= faults.max_idle_generations:
            return Stop("no-start", f"{self._unrecorded} starts in a row did not get going; last: {message}", hint)
        return Retry(min(60.0, faults.retry_delay_s * 2 ** (self._unrecorded - 1)))


@contextlib.contextmanager
def default_sigint() -> Iterator[None]:
    """Start children with SIGINT at its default: a shell's background job ignores it, and an ignored signal is inherited."""
    ignored = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    )
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
