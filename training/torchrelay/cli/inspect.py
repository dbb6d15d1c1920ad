"""Commands that look at runs: ``runs``, ``show``, ``checkpoints``, ``verify``. All they say is read from the store."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from torchrelay.checkpoint.generation import list_runs, read_run
from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef
from torchrelay.checkpoint.reader import (
    CheckpointRow,
    list_checkpoints,
    loss_trace,
    verify_and_mark,
)
from torchrelay.cli.console import print_table, say, settings
from torchrelay.config import parse_spec
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.relay import GenerationSummary, read_status
from torchrelay.store import open_store
from torchrelay.store.base import ObjectStore

__all__ = ["add_json", "add_parsers", "add_run_arguments", "choose_checkpoint", "open_run_of"]


def add_parsers(subparsers: Any) -> None:
    """Add the commands."""
    parser = subparsers.add_parser("runs", help="list the runs of the store")
    parser.add_argument("--store", default="", metavar="URL", help="store to look at")
    add_json(parser)
    parser.set_defaults(handler=_runs)
    parser = subparsers.add_parser("show", help="show a run: what it is, where it stands, what happened to it")
    add_run_arguments(parser)
    add_json(parser)
    parser.set_defaults(handler=_show)
    parser = subparsers.add_parser("checkpoints", help="list the checkpoints on a run's line")
    add_run_arguments(parser)
    add_json(parser)
    parser.set_defaults(handler=_checkpoints)
    parser = subparsers.add_parser(
        "verify",
        help="read every byte of a run's checkpoints back and check it",
        description="Read every byte of a run's checkpoints back and check it. What is damaged is marked, so that loads step over it; what was "
        "marked and is whole is unmarked, and noted as verified. Exit code 65 if there is damage.",
    )
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, help="only the checkpoint of this step")
    parser.set_defaults(handler=_verify)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run's name and the store."""
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("--store", default="", metavar="URL", help="store to look at")


def open_run_of(args: argparse.Namespace) -> tuple[ObjectStore, dict[str, Any]]:
    """Open the store, and read what the run is. Raises ConfigError for what cannot be a name, NotFoundError with the names there are."""
    parse_spec({"run": {"run_id": args.run}}, where="RUN")
    store = open_store(args.store, environ=settings())
    try:
        return store, read_run(store, args.run)
    except NotFoundError:
        known = list_runs(store)
        hint = f"there are: {', '.join(known[-8:])}" if known else "there are none in this store"
        raise NotFoundError(f"no run {args.run!r} in {store.url}", hint=hint) from None


def choose_checkpoint(store: ObjectStore, run_id: str, step: int | None) -> ManifestRef:
    """Return the checkpoint of a step on the run's line, or the newest. Raises NotFoundError naming the steps there are."""
    history = read_history(store, run_id)
    chosen = [ref for ref in history.line if step is None or ref.step == step]
    if chosen:
        return chosen[-1]
    steps = ", ".join(str(ref.step) for ref in history.line[-8:])
    marked = step in {ref.step for ref in history.damaged}
    raise NotFoundError(
        f"run {run_id!r} has no checkpoint" + (f" of step {step}" if step is not None else ""),
        hint="it is marked as damaged: torchrelay verify" if marked else f"its newest: {steps or 'none yet'}",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def _runs(args: argparse.Namespace) -> int:
    store = open_store(args.store, environ=settings())
    rows = []
    for run_id in list_runs(store):
        status = read_status(store, run_id)
        newest = status.generations[-1] if status.generations else None
        rows.append(
            {
                "run": run_id,
                "committed": status.committed_step,
                "of": status.total_steps or 0,
                "state": _state(newest, finished=status.finished),
                "generations": newest.number if newest else 0,
                "started": _when(newest.started_s) if newest else "",
            }
        )
    if args.json:
        print(json.dumps(rows))
    elif rows:
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    else:
        say(f"no runs in {store.url}; torchrelay train --run-id my-run starts one")
    return 0


def _show(args: argparse.Namespace) -> int:
    store, run = open_run_of(args)
    status = read_status(store, args.run)
    if args.json:
        body = {
            "run": run,
            "committed_step": status.committed_step,
            "finished": status.finished,
            "generations": [
                {
                    "number": item.number,
                    "begin_step": item.begin_step,
                    "host": item.host,
                    "why": item.why,
                    "started_s": item.started_s,
                    "outcome": item.outcome.to_dict() if item.outcome else None,
                }
                for item in status.generations
            ],
        }
        print(json.dumps(body))
        return 0
    spec = run["spec"]
    trace = [(step, loss) for step, loss in loss_trace(store, args.run) if loss is not None]
    losses = (
        f"{trace[0][1]:.4g} at step {trace[0][0]}, {trace[-1][1]:.4g} at step {trace[-1][0]}" if trace else "none yet"
    )
    newest = status.generations[-1] if status.generations else None
    print_table(
        ["", ""],
        [
            ["run", args.run],
            ["job", spec["job"]],
            ["options", json.dumps(spec["options"])],
            ["committed", f"step {status.committed_step} of {status.total_steps}"],
            ["state", _state(newest, finished=status.finished)],
            ["loss", losses],
            ["store", store.url],
        ],
    )
    say("")
    print_table(
        ["generation", "started (UTC)", "host", "began at", "reached", "ended", "why"],
        [_generation(item) for item in status.generations],
    )
    return 0


def _generation(item: GenerationSummary) -> list[object]:
    outcome = item.outcome
    message = outcome.message.splitlines()[0][:160] if outcome and outcome.message else ""
    ended = f"{outcome.kind}{': ' + message if message else ''}" if outcome else "running, or fell without a word"
    return [
        item.number,
        _when(item.started_s),
        item.host,
        item.begin_step,
        outcome.last_step if outcome else "",
        ended,
        item.why,
    ]


def _checkpoints(args: argparse.Namespace) -> int:
    store, _ = open_run_of(args)
    rows = [_checkpoint(row) for row in list_checkpoints(store, args.run)]
    if args.json:
        print(json.dumps(rows))
    elif rows:
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    else:
        say(f"run {args.run} has no checkpoint yet")
    return 0


def _checkpoint(row: CheckpointRow) -> dict[str, object]:
    manifest = row.manifest
    loss = manifest.trace[-1][1] if manifest and manifest.trace else None
    return {
        "step": row.ref.step,
        "generation": row.ref.generation,
        "ranks": manifest.world_size if manifest else "",
        "MiB": round(row.size_bytes / 2**20, 2),
        "loss": round(loss, 4) if loss is not None else "",
        "ledger": str(manifest.data.get("ledger", ""))[:12] if manifest else "",
        "state": ("damaged" if row.damaged else "verified" if row.verified else "committed") + ", pinned" * row.pinned,
    }


def _verify(args: argparse.Namespace) -> int:
    store, _ = open_run_of(args)
    rows = [row for row in list_checkpoints(store, args.run) if args.step is None or row.ref.step == args.step]
    if not rows:
        choose_checkpoint(store, args.run, args.step)  # raises, naming what there is
    bad = 0
    for row in rows:
        began = time.monotonic()
        try:
            size = verify_and_mark(store, args.run, row.ref)
        except CorruptionError as error:
            bad += 1
            say(f"step {row.ref.step}: DAMAGED, loads step over it: {error}")
            continue
        except NotFoundError:
            say(f"step {row.ref.step}: forgotten while it was read")
            continue
        note = "; it was marked as damaged, the mark is removed" if row.damaged else ""
        say(f"step {row.ref.step}: whole ({size / 2**20:.1f} MiB in {time.monotonic() - began:.1f} s){note}")
    say(f"{len(rows) - bad} of {len(rows)} checkpoints are whole")
    return CorruptionError.exit_code if bad else 0


def _state(newest: GenerationSummary | None, *, finished: bool) -> str:
    if finished:
        return "finished"
    if newest is None:
        return "never started"
    return f"ended: {newest.outcome.kind}" if newest.outcome else "running, or fell without a word"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
