"""Commands that take care of the store: ``fsck``, ``forget``, ``sweep``, ``pin`` and ``unpin``. What deletes shows its plan first."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from typing import Any

from torchrelay.checkpoint.history import read_history
from torchrelay.checkpoint.layout import ManifestRef, manifests_prefix, parse_manifest_key
from torchrelay.checkpoint.marks import list_pins, pin, unpin
from torchrelay.checkpoint.retention import forget, plan_retention
from torchrelay.checkpoint.survey import Survey, take_survey
from torchrelay.checkpoint.sweep import GRACE_S, plan_sweep, sweep
from torchrelay.cli.console import print_table, say
from torchrelay.cli.inspect import add_json, add_run_arguments, choose_checkpoint, open_run_of
from torchrelay.config import KeepSpec
from torchrelay.errors import ConfigError, CorruptionError, NotFoundError
from torchrelay.store.base import ObjectStore
from torchrelay.upkeep import forget_superseded, policy_of

__all__ = ["add_parsers"]

_SHOWN = 20


def add_parsers(subparsers: Any) -> None:
    """Add the commands."""
    parser = subparsers.add_parser(
        "fsck",
        help="explain every object of a run: live, forgotten, debris or unknown",
        description="Explain every object of a run: live, forgotten, debris or unknown; changes nothing. Exit code 65 if a live object is missing "
        "or unreadable. It looks at names, sizes and documents; torchrelay verify reads the tensors' bytes.",
    )
    add_run_arguments(parser)
    parser.add_argument("--list", action="store_true", help="one line per object")
    add_json(parser)
    parser.set_defaults(handler=_fsck)
    _add_forget(subparsers)
    parser = subparsers.add_parser(
        "sweep",
        help="free the space of what is forgotten or was never committed",
        description="Free the space of what is forgotten or was never committed. Shows what it would delete; --execute deletes it. "
        "Safe beside training, and to interrupt.",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--grace-hours", type=float, default=GRACE_S / 3600, metavar="H", help="younger objects stay (default: 24)"
    )
    parser.add_argument("--execute", action="store_true", help="do it")
    parser.set_defaults(handler=_sweep)
    parser = subparsers.add_parser("pin", help="keep a checkpoint whatever the retention policy says")
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    parser.add_argument("--why", default="", help="a word for whoever finds the pin")
    parser.set_defaults(handler=_pin)
    parser = subparsers.add_parser("unpin", help="leave a pinned checkpoint to the retention policy again")
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    parser.set_defaults(handler=_unpin)


def _add_forget(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "forget",
        help="drop checkpoints that newer ones supersede",
        description="Drop checkpoints that newer verified ones supersede: they stop existing for everybody, their losses stay, and sweep frees "
        "their space later. Shows what it would forget; --execute does it. Never the newest, nor one that is in use or pinned; nothing at all before "
        "enough are verified.",
    )
    add_run_arguments(parser)
    keep = KeepSpec()
    parser.add_argument("--step", type=int, help="only the checkpoint of this step, whatever the policy says")
    parser.add_argument("--newest", type=int, default=keep.newest, metavar="K", help="keep the newest K verified ones")
    parser.add_argument(
        "--every-steps", type=int, default=keep.every_steps, metavar="N", help="keep those at multiples of N"
    )
    parser.add_argument(
        "--ladder-hours",
        type=float,
        default=keep.ladder_hours,
        metavar="H",
        help="keep a ladder so far back, each at most twice as old as the one before (0: none)",
    )
    parser.add_argument("--execute", action="store_true", help="do it")
    parser.set_defaults(handler=_forget)


def _fsck(args: argparse.Namespace) -> int:
    store, _ = open_run_of(args)
    survey = take_survey(store, args.run)
    bad = bool(survey.missing or survey.unreadable)
    if args.json:
        objects = [
            {
                "key": item.info.key,
                "bytes": item.info.size_bytes,
                "kind": item.kind,
                "status": item.status,
                "why": item.why,
            }
            for item in survey.findings
        ]
        print(json.dumps({"objects": objects, "missing": survey.missing, "unreadable": survey.unreadable}))
        return CorruptionError.exit_code if bad else 0
    if args.list:
        rows = [[item.status, item.kind, item.info.size_bytes, item.info.key, item.why] for item in survey.findings]
        print_table(["status", "kind", "bytes", "key", "why"], rows)
    else:
        _print_summary(survey)
    for key in survey.missing:
        say(f"MISSING: {key}, which a checkpoint needs")
    for key in survey.unreadable:
        say(f"UNREADABLE: {key}")
    if bad:
        say(f"torchrelay verify {args.run} finds which checkpoints are damaged, so that loads step over them")
    return CorruptionError.exit_code if bad else 0


def _print_summary(survey: Survey) -> None:
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for item in survey.findings:
        row = (item.status, f"{item.kind}: {item.why}")
        count[row] += 1
        size[row] += item.info.size_bytes
    order = ["live", "forgotten", "debris", "unknown"]
    rows = [
        [status, count[status, what], round(size[status, what] / 2**20, 2), what]
        for status, what in sorted(count, key=lambda row: (order.index(row[0]), row[1]))
    ]
    print_table(["status", "objects", "MiB", "what"], rows)
    unknown = [item.info.key for item in survey.of("unknown")]
    for key in unknown[:_SHOWN]:
        say(f"unknown: {key}")


def _forget(args: argparse.Namespace) -> int:
    store, _ = open_run_of(args)
    if args.step is not None:
        return _forget_one(store, args.run, args.step, execute=args.execute)
    try:
        keep = KeepSpec(newest=args.newest, every_steps=args.every_steps, ladder_hours=args.ladder_hours)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    choices = plan_retention(store, args.run, policy_of(store, args.run, keep))
    if not choices:
        say(f"run {args.run} has no checkpoint yet")
        return 0
    print_table(
        ["step", "generation", "", "why"],
        [
            [
                item.ref.step,
                item.ref.generation,
                "forget" if item.forget else "keep",
                item.why or ", ".join(item.kept_by),
            ]
            for item in choices
        ],
    )
    chosen = [item for item in choices if item.forget]
    if not chosen:
        say("nothing to forget")
    elif args.execute:
        done = forget_superseded(store, args.run, choices)
        say(
            f"forgot {len(done)} of {len(choices)} checkpoints; torchrelay sweep {args.run} frees their space after a day"
        )
    else:
        say(f"would forget {len(chosen)} of {len(choices)} checkpoints; --execute does it")
    return 0


def _forget_one(store: ObjectStore, run_id: str, step: int, *, execute: bool) -> int:
    history = read_history(store, run_id)
    damaged = [ref for ref in history.damaged if ref.step == step]
    refs = damaged or [choose_checkpoint(store, run_id, step)]
    for ref in refs:
        if not execute:
            say(f"would forget the checkpoint of step {step} (generation {ref.generation}); --execute does it")
        elif forget(store, run_id, ref, why="by hand"):
            say(f"forgot the checkpoint of step {step} (generation {ref.generation})")
        else:
            raise ConfigError(
                f"the checkpoint of step {step} is needed: the newest, or where the newest generation began, or pinned",
                hint=f"torchrelay checkpoints {run_id}; torchrelay unpin {run_id} --step {step} removes a pin",
            )
    return 0


def _sweep(args: argparse.Namespace) -> int:
    store, _ = open_run_of(args)
    if not (math.isfinite(args.grace_hours) and args.grace_hours >= 0):
        raise ConfigError(f"--grace-hours must be a number of hours from 0 up, not {args.grace_hours}")
    plan = plan_sweep(take_survey(store, args.run), grace_s=3600 * args.grace_hours)
    rows: Counter[tuple[str, str]] = Counter()
    for item in plan.findings:
        rows[item.status, f"{item.kind}: {item.why}"] += 1
    if rows:
        print_table(["status", "objects", "what"], [[status, number, what] for (status, what), number in rows.items()])
    later = f"; {plan.young} objects stay because they are younger than {args.grace_hours:g} h" if plan.young else ""
    if not plan.findings:
        say(f"nothing to sweep{later}")
    elif args.execute:
        say(f"deleted {len(plan.findings)} objects, {sweep(store, plan) / 2**20:.1f} MiB{later}")
    else:
        say(f"would delete {len(plan.findings)} objects, {plan.size_bytes / 2**20:.1f} MiB{later}; --execute does it")
    return 0


def _pin(args: argparse.Namespace) -> int:
    store, _ = open_run_of(args)
    refs = _committed(store, args.run, args.step)
    for ref in refs:
        pin(store, args.run, ref, why=args.why)
    say(f"pinned the checkpoint of step {args.step}: it is kept until torchrelay unpin {args.run} --step {args.step}")
    return 0


def _unpin(args: argparse.Namespace) -> int:
    store, _ = open_run_of(args)
    refs = [ref for ref in list_pins(store, args.run) if ref.step == args.step]
    if not refs:
        pinned = ", ".join(str(ref.step) for ref in sorted(list_pins(store, args.run)))
        raise NotFoundError(f"step {args.step} is not pinned", hint=f"pinned: {pinned or 'none'}")
    for ref in refs:
        unpin(store, args.run, ref)
    say(f"the checkpoint of step {args.step} is left to the retention policy again")
    return 0


def _committed(store: ObjectStore, run_id: str, step: int) -> list[ManifestRef]:
    """All checkpoints of a step, also those on a branch that the run left: a pin keeps such a one from the sweep."""
    keys = store.list(manifests_prefix(run_id)).objects
    return [ref for item in keys if (ref := parse_manifest_key(item.key)) and ref.step == step] or [
        choose_checkpoint(store, run_id, step)
    ]
