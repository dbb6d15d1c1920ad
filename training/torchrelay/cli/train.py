"""``torchrelay train``: start a run, or go on with it, through Prefect or, with ``--local``, right here.

Both ask the store where the run stands and train what is missing, so repeating a command is always safe. An example of a spec file:

    segment_steps = 200

    [run]
    run_id = "my-run"                       # names the run for good
    job = "my_package.my_module:build"      # or path/to/file.py:build; left out: a small language model
    total_steps = 10000
    global_batch = 64

    [world]
    ranks = 2

    [save]
    interval_steps = 100
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import secrets
import signal
import socket
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from torchrelay.attempt import Attempt, Event, Judge, restored_line
from torchrelay.cli.console import console, say, settings
from torchrelay.cli.prefect_api import PrefectAPI
from torchrelay.config import TrainSpec, load_spec
from torchrelay.errors import ConfigError, RetryableError, StoppedError
from torchrelay.relay import FREE_KINDS, Outcome, Position, Stop, read_position, read_status
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["add_parsers", "train_here"]

_POLL_S = 0.5
_ASK_SERVER_EVERY_S = 2.0
_LINE_EVERY_S = 10.0
_EXIT_STOPPED = 75  # EX_TEMPFAIL: the same command goes on


def add_parsers(subparsers: Any) -> None:
    """Add ``train``."""
    parser = subparsers.add_parser(
        "train",
        help="start a run, or go on with it",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "spec", nargs="?", type=Path, metavar="SPEC.toml", help="what to train (default: the small language model)"
    )
    parser.add_argument("--run-id", metavar="NAME", help="name of the run; the same as --set run.run_id=NAME")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="one field of the spec, for instance world.ranks=2; may be repeated, wins over the file",
    )
    parser.add_argument("--store", metavar="URL", help="object store; the same as --set store=URL")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--local", action="store_true", help="train in this terminal, without Prefect")
    how.add_argument("--detach", action="store_true", help="start it through Prefect and return at once")
    parser.set_defaults(handler=_train)


def _train(args: argparse.Namespace) -> int:
    overrides = dict(_assignment(text) for text in args.set)
    if args.run_id is not None:
        overrides["run.run_id"] = args.run_id
    if args.store is not None:
        overrides["store"] = args.store
    if args.spec is None and "run.run_id" not in overrides:
        raise ConfigError("a run needs a name", hint="torchrelay train --run-id my-run, or name a spec file")
    spec = load_spec(args.spec, overrides)
    environ = settings()
    if args.local:
        return train_here(spec, environ)
    api = PrefectAPI(environ)
    store = open_store(spec.store, environ=environ)
    read_position(store, spec)  # a run that exists with another spec is refused here, before a flow run is made
    flow_run = api.start(spec)
    say(f"flow run {flow_run.name} for run {spec.run.run_id}: {flow_run.url}")
    return 0 if args.detach else _follow(store, spec, api, flow_run.id)


def _assignment(text: str) -> tuple[str, Any]:
    """Read FIELD=VALUE; the value is TOML if it can be, otherwise a string."""
    name, found, value = text.partition("=")
    if not found or not name.strip():
        raise ConfigError(f"--set {text!r} is not FIELD=VALUE", hint="for instance --set world.ranks=2")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value


def train_here(spec: TrainSpec, environ: Mapping[str, str]) -> int:
    """Train in this process's own children until the run is finished. Ctrl-C and SIGTERM save, commit and stop."""
    store = open_store(spec.store, environ=environ)
    with _View(spec) as view:
        return asyncio.run(_Relay(spec, store, environ, view).run())


class _Relay:
    """Segment after segment, as the flow does it, for one command."""

    def __init__(self, spec: TrainSpec, store: ObjectStore, environ: Mapping[str, str], view: _View) -> None:
        self._spec, self._store, self._environ, self._view = spec, store, environ, view
        self._origin = f"command/{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._judge = Judge(spec=spec, origin=self._origin)
        self._stop = asyncio.Event()
        self._attempt: Attempt | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop)
        position = await asyncio.to_thread(read_position, self._store, self._spec)
        fault, generations = "", 0
        while True:
            step = position.status.committed_step
            self._view.committed(step)
            if position.plan is None:
                done = "finished" if generations else "finished already; nothing was done"
                self._view.line(f"run {self._spec.run.run_id} is {done}: step {step} is committed")
                return 0
            if self._stop.is_set():
                self._view.line(f"stopped: step {step} is committed, the same command goes on from there")
                return _EXIT_STOPPED
            why = f"segment {position.plan.index}" + (f", again after: {fault}" if fault else "")
            outcome = await self._try(position.plan.stop_step, why)
            generations += 1
            fault = "" if outcome.kind in FREE_KINDS else outcome.kind
            position = await self._after(outcome)

    async def _try(self, stop_step: int, why: str) -> Outcome:
        self._attempt = Attempt(
            spec=self._spec,
            stop_step=stop_step,
            origin=self._origin,
            why=why,
            on_event=self._view.event,
            on_log=self._view.line,
            environ=self._environ,
        )
        try:
            return await self._attempt.run()
        finally:
            self._attempt = None

    async def _after(self, outcome: Outcome) -> Position:
        """Read where the run stands now, and wait before the next attempt if the last one failed. Raises StoppedError."""
        delay_s = 0.0
        if outcome.kind != "completed":
            first = outcome.message.splitlines()[0] if outcome.message else ""
            self._view.line(f"generation {outcome.generation} ended: {outcome.kind}{' - ' + first if first else ''}")
        while True:
            try:
                position = await asyncio.to_thread(read_position, self._store, self._spec)
            except RetryableError as error:
                decision = self._judge.unrecorded(str(error))
                if isinstance(decision, Stop):
                    raise StoppedError(decision.reason, hint=decision.hint) from None
                await self._pause(decision.delay_s)
                continue
            if outcome.kind != "completed" and not self._stop.is_set():
                decision = self._judge.decide(position.status, outcome)
                if isinstance(decision, Stop):
                    raise StoppedError(decision.reason, hint=decision.hint)
                delay_s = decision.delay_s
            await self._pause(delay_s)
            return position

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    def _asked_to_stop(self) -> None:
        if not self._stop.is_set():
            self._view.line("stopping: the ranks save and commit first")
        self._stop.set()
        if self._attempt is not None:
            self._attempt.request_stop()


def _follow(store: ObjectStore, spec: TrainSpec, api: PrefectAPI, flow_run_id: str) -> int:
    """Show a run that Prefect trains until its flow run has ended. Leaving off does not stop it."""
    with _View(spec) as view:
        try:
            return _follow_to_end(store, spec, api, flow_run_id, view)
        except KeyboardInterrupt:
            view.line(f"the run goes on; torchrelay show {spec.run.run_id} says where it is")
            return 130


def _follow_to_end(store: ObjectStore, spec: TrainSpec, api: PrefectAPI, flow_run_id: str, view: _View) -> int:
    asked, known = 0.0, ""
    while True:
        if time.monotonic() - asked >= _ASK_SERVER_EVERY_S:
            asked = time.monotonic()
            try:
                state = api.state(flow_run_id)
            except RetryableError:
                view.once("the Prefect server does not answer; the store is watched on")
            else:
                if state.name != known:
                    view.line(f"flow run: {state.name}")
                known = state.name
                if state.ended:
                    _show_progress(store, spec, view)
                    view.line(state.message)
                    return 0 if state.type == "COMPLETED" else StoppedError.exit_code
        _show_progress(store, spec, view)
        time.sleep(_POLL_S)


def _show_progress(store: ObjectStore, spec: TrainSpec, view: _View) -> None:
    try:
        status = read_status(store, spec.run.run_id)
    except RetryableError:
        view.once("the store does not answer; waiting for it")
        return
    for item in status.generations:
        view.generation(item.number, item.begin_step)
    view.committed(status.committed_step)


class _View:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, spec: TrainSpec) -> None:
        self._total = spec.run.total_steps
        self._committed = self._generation = -1
        self._told_s = 0.0
        self._said: set[str] = set()
        self._progress: Progress | None = None
        if console().is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console(),
            )
            self._task = self._progress.add_task(spec.run.run_id, total=self._total, loss="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def line(self, text: str) -> None:
        """Show a line for good."""
        if text:
            say(text)

    def once(self, text: str) -> None:
        """Show a line, but only the first time."""
        if text not in self._said:
            self._said.add(text)
            self.line(text)

    def generation(self, number: int, begin_step: int) -> None:
        """A generation has begun."""
        if number > self._generation:
            self._generation = number
            self.line(f"generation {number} begins at step {begin_step}")

    def committed(self, step: int) -> None:
        """The newest committed step."""
        if step == self._committed:
            return
        self._committed = step
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        elif step:
            self.line(f"step {step} of {self._total} is committed")

    def event(self, event: Event) -> None:
        """One event of a launcher."""
        match event.get("event"):
            case "generation":
                self.generation(int(event["generation"]), int(event["begin_step"]))
            case "restored":
                self.line(restored_line(event))
            case "progress":
                self._step(int(event["step"]), event.get("loss"))
            case "saved" if event.get("state") == "committed":
                if self._progress is None:
                    self.committed(int(event["step"]))
            case "saved" if event.get("state") == "failed":
                self.line(f"save of step {event.get('step')} failed: {event.get('message')}")
            case "notice":
                self.line(str(event.get("message")))
            case "sample":
                self.line(f"the model writes:\n{event.get('text')}")

    def _step(self, step: int, loss: object) -> None:
        shown = f"loss {loss:.4f}" if isinstance(loss, float) and math.isfinite(loss) else ""
        if self._progress is not None:
            self._progress.update(self._task, completed=step, loss=shown)
        elif time.monotonic() - self._told_s >= _LINE_EVERY_S:
            self._told_s = time.monotonic()
            self.line(f"step {step} of {self._total}{', ' + shown if shown else ''}")
