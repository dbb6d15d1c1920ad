"""The processes of one generation: started together, watched, and ended together.

Decides nothing about the run; says how each rank ended. Ranks are killed with all that they started; couriers may finish what is staged.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchrelay.config import TrainSpec
from torchrelay.launch.classify import EXIT_PREEMPTED, Cause, RankExit, classify
from torchrelay.launch.processes import Child, oom_kills, spawn
from torchrelay.launch.rendezvous import free_port

__all__ = ["Gang", "GangCommands"]

_SETTLE_S = 0.5  # time for the other ranks to report, so that the root cause is known
_TICK_S = 0.25
_COURIER_RESTARTS = 5
_STEP_PHASE = 2  # of worker.PHASES: init, load, step, save, finish
_PHASES = ("init", "load", "step", "save", "finish")


@dataclass(frozen=True, kw_only=True, slots=True)
class GangCommands:
    """Command lines of a rank and a courier; tests put other programs in their place."""

    rank: Sequence[str] = (sys.executable, "-m", "torchrelay.worker")
    courier: Sequence[str] = (sys.executable, "-m", "torchrelay.state.courier")


@dataclass(kw_only=True)
class Gang:
    """Ranks and couriers of one generation on this host.

    ``on_event`` gets every event of the children; ``tick`` is called a few times a second, returns a reason to end the gang at once, or None.
    ``stop_requested`` says whether to stop gracefully.
    """

    spec: TrainSpec
    generation: int
    folder: Path
    on_event: Callable[[dict[str, Any]], None]
    tick: Callable[[], str | None]
    stop_requested: Callable[[], bool]
    commands: GangCommands = field(default_factory=GangCommands)
    first_step_s: float | None = None
    _ranks: list[Child] = field(default_factory=list)
    _couriers: list[Child] = field(default_factory=list)
    _ends: dict[int, float] = field(default_factory=dict)
    _restarts: dict[int, int] = field(default_factory=dict)
    _buffer: bytes = b""

    def run(self) -> Cause:
        """Start everything, wait for the end, leave nothing behind."""
        before_oom, began = oom_kills(), time.monotonic()
        read_fd, self._events_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(self._events_fd, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(read_fd, selectors.EVENT_READ, "events")
        self._read_fd = read_fd
        try:
            self._start()
            override = self._watch(began)
            exits = self._rank_exits()
            self._end_ranks()
            self._drain()
        finally:
            self._end_all()
            self._read_events()
            self._selector.close()
            os.close(read_fd)
            os.close(self._events_fd)
        return override or classify(exits, oom_kills=oom_kills() - before_oom)

    @property
    def last_step(self) -> int:
        """Highest step that any rank has finished."""
        return max((int(self._page(rank)[1]) for rank in range(self.spec.world.ranks)), default=0)

    def _start(self) -> None:
        for rank in range(self.spec.world.ranks):
            (self.folder / f"rank-{rank}.progress").write_bytes(struct.pack("<3d", 0, 0, time.monotonic()))
        self._environ = {
            **os.environ,
            "WORLD_SIZE": str(self.spec.world.ranks),
            "LOCAL_WORLD_SIZE": str(self.spec.world.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHRELAY_WORKDIR": str(self.folder),
            "TORCHRELAY_GENERATION": str(self.generation),
            "TORCHRELAY_PARENT": str(os.getpid()),
            "TORCHRELAY_EVENTS_FD": str(self._events_fd),
            "OMP_NUM_THREADS": str(self.spec.world.threads_per_rank),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._couriers = [self._spawn("courier", rank) for rank in range(self.spec.world.ranks)]
        self._ranks = [self._spawn("rank", rank) for rank in range(self.spec.world.ranks)]

    def _spawn(self, role: str, rank: int) -> Child:
        command = self.commands.rank if role == "rank" else self.commands.courier
        environ = {**self._environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = self.folder / f"{role}-{rank}.log"
        child = spawn(role, rank, command, environ=environ, log=log, pass_fds=(self._events_fd,))
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self.on_event({"event": "process", "role": role, "rank": rank, "pid": child.pid})
        return child

    def _watch(self, began: float) -> Cause | None:
        """Wait until all ranks have ended, or some must be ended; returns a cause that exit codes cannot tell."""
        faults, stop_since = self.spec.faults, 0.0
        while True:
            self._wait(_TICK_S)
            reason = self.tick()
            if reason is not None:
                return Cause(kind="fenced", message=reason)
            if self._couriers_failed():
                return Cause(
                    kind="exception", message="a courier died again and again; see its log", fingerprint="courier"
                )
            now = time.monotonic()
            if all(child.code is not None for child in self._ranks):
                # A rank that was asked to stop before it could listen ends by the signal itself.
                codes = {child.code for child in self._ranks}
                early = stop_since and -signal.SIGTERM in codes and codes <= {0, EXIT_PREEMPTED, -signal.SIGTERM}
                return Cause(kind="preempted") if early else None
            if self._first_failure() is not None and now - (self._first_failure() or now) > _SETTLE_S:
                return None
            if self.stop_requested() and not stop_since:
                stop_since = now
                for child in self._ranks:
                    child.signal(signal.SIGTERM)
            stopped = stop_since and any(child.is_stopped() for child in self._ranks)
            if stop_since and (stopped or now - stop_since > faults.grace_s):
                return Cause(
                    kind="preempted", message=f"asked to stop; not committed within the grace of {faults.grace_s:.0f} s"
                )
            if self.first_step_s is None:
                if any(self._page(rank)[0] >= _STEP_PHASE for rank in range(len(self._ranks))):
                    self.first_step_s = now - began
                elif now - began > faults.start_timeout_s:
                    return Cause(kind="startup", message=self._slow_start())

    def _wait(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data == "events":
                self._read_events()
                continue
            child = key.data
            self._selector.unregister(child.pidfd)
            if child.role == "rank":
                self._ends[child.rank] = time.monotonic()

    def _first_failure(self) -> float | None:
        failed = [
            self._ends.get(child.rank, 0.0) for child in self._ranks if child.code not in (None, 0, EXIT_PREEMPTED)
        ]
        return min(failed, default=None)

    def _couriers_failed(self) -> bool:
        """Start couriers again that died while their rank lives; True if one dies for ever."""
        for index, child in enumerate(self._couriers):
            # One that ended with 0 was let go by its rank, which is about to end too.
            if child.code in (None, 0) or self._ranks[index].code is not None:
                continue
            tries = self._restarts[index] = self._restarts.get(index, 0) + 1
            if tries > _COURIER_RESTARTS:
                return True
            self.on_event(
                {"event": "notice", "message": f"courier {index} ended with {child.code}; started again ({tries})"}
            )
            child.kill()
            child.reap()
            self._couriers[index] = self._spawn("courier", index)
        return False

    def _rank_exits(self) -> list[RankExit]:
        now = time.monotonic()
        first = min(self._ends.values(), default=now)
        exits = []
        for child in self._ranks:
            code, report = child.code, self._report(child.rank)
            exits.append(
                RankExit(
                    rank=child.rank,
                    code=-signal.SIGKILL if code is None else code,
                    after_s=self._ends.get(child.rank, now) - first,
                    ours=code is None,
                    step=int(self._page(child.rank)[1]),
                    reached_step=self._page(child.rank)[0] >= _STEP_PHASE,
                    report=report,
                )
            )
        return exits

    def _end_ranks(self) -> None:
        for child in self._ranks:
            child.kill()
        for child in self._ranks:
            child.reap()

    def _drain(self) -> None:
        """Let the couriers finish what is staged. They end by themselves: their rank is gone, and none will come."""
        deadline = time.monotonic() + self.spec.faults.drain_s
        for child in self._couriers:
            child.signal(signal.SIGTERM)
        while any(child.code is None for child in self._couriers) and time.monotonic() < deadline:
            self._wait(_TICK_S)
            self.tick()

    def _end_all(self) -> None:
        for child in (*self._ranks, *self._couriers):
            child.kill()
        for child in (*self._ranks, *self._couriers):
            child.reap()

    def _read_events(self) -> None:
        while True:
            try:
                data = os.read(self._read_fd, 65536)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # an event longer than a pipe takes at once; it was cut by its writer
                self.on_event(event)

    def _page(self, rank: int) -> tuple[float, float, float]:
        try:
            phase, step, when = struct.unpack("<3d", (self.folder / f"rank-{rank}.progress").read_bytes())
        except (FileNotFoundError, struct.error):
            return 0.0, 0.0, 0.0  # not started yet
        return phase, step, when

    def _report(self, rank: int) -> dict[str, Any]:
        try:
            body = json.loads((self.folder / f"rank-{rank}.failure.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}

    def _slow_start(self) -> str:
        slow = [f"rank {rank} in phase {_PHASES[int(self._page(rank)[0])]}" for rank in range(len(self._ranks))]
        return f"no rank reached its first step within {self.spec.faults.start_timeout_s:.0f} s ({', '.join(slow)})"
