"""``torchrelay export`` and ``import``: one checkpoint as files that other programs read, and theirs as the first checkpoint of a run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.export import export_safetensors
from torchrelay.cli.console import say, settings
from torchrelay.cli.inspect import add_run_arguments, choose_checkpoint, open_run_of
from torchrelay.config import parse_spec
from torchrelay.errors import ConfigError, NotFoundError

__all__ = ["add_parsers"]

_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt", "dcp": ""}


def add_parsers(subparsers: Any) -> None:
    """Add ``export`` and ``import``."""
    parser = subparsers.add_parser(
        "export",
        help="write a checkpoint to a file",
        description="Write one checkpoint to a file or folder that other programs read; every byte is checked on the way.",
    )
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--format",
        choices=list(_SUFFIXES),
        default="safetensors",
        help="safetensors: the model's weights under their own names; torch: the whole state, for torch.load(weights_only=True); dcp: the whole "
        "state as a folder for torch.distributed.checkpoint",
    )
    parser.add_argument(
        "--component", help="what safetensors takes (default: model), for instance ema; dcp then takes this one alone"
    )
    parser.add_argument("--output", type=Path, metavar="PATH", help="default: RUN-step-N.safetensors or .pt, here")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.set_defaults(handler=_export)
    parser = subparsers.add_parser(
        "import",
        help="begin a run with a checkpoint that another program saved",
        description="Begin a run with a checkpoint that another program saved: a file of torch.save, or a folder of torch.distributed.checkpoint. "
        "Plain data only; nothing that could run code is read.",
    )
    parser.add_argument("source", type=Path, metavar="PATH", help="file of torch.save, or folder")
    parser.add_argument("--run-id", required=True, metavar="RUN", help="name of the new run")
    parser.add_argument("--store", default="", metavar="URL", help="store to put it in")
    parser.add_argument("--step", type=int, default=0, help="steps that were done (default: the file's own, or 1)")
    parser.add_argument(
        "--component", action="append", default=[], metavar="NAME", help="take only this (may be repeated)"
    )
    parser.set_defaults(handler=_import)


def _export(args: argparse.Namespace) -> int:
    store, _ = open_run_of(args)
    ref = choose_checkpoint(store, args.run, args.step)
    output = args.output or Path(f"{args.run}-step-{ref.step}{_SUFFIXES[args.format]}")
    if output.exists() and not args.force:
        raise ConfigError(f"{output} exists", hint="--force replaces it, --output names another file")
    if args.format == "safetensors":
        component = args.component or "model"
        count = export_safetensors(store, args.run, ref, output, component=component)
        say(f"{output}: {count} tensors of {component!r} at step {ref.step}, every byte checked")
        return 0
    if args.format == "torch" and args.component:
        raise ConfigError("--format torch holds the whole state", hint="leave --component out")
    words = [args.run, str(ref), str(output), args.format, *([args.component] if args.component else [])]
    done = _with_torch("export", words, args.store)
    if done.returncode:
        print(done.stderr.rstrip(), file=sys.stderr)
        return done.returncode
    use = f"torch.load({str(output)!r}, weights_only=True)"
    if args.format == "dcp":
        use = f"torch.distributed.checkpoint.load(..., checkpoint_id={str(output)!r})"
    say(f"{output}: {args.component or 'the whole state'} at step {ref.step}, every byte checked; {use}")
    return 0


def _import(args: argparse.Namespace) -> int:
    parse_spec({"run": {"run_id": args.run_id}}, where="--run-id")
    if not args.source.exists():
        raise NotFoundError(f"there is no {args.source}")
    if args.step < 0:
        raise ConfigError(f"--step {args.step} is not a number of steps")
    request = {"source": str(args.source), "run_id": args.run_id, "step": args.step, "only": args.component}
    done = _with_torch("intake", [json.dumps(request)], args.store)
    if done.returncode:
        print(done.stderr.rstrip(), file=sys.stderr)
        return done.returncode
    told = json.loads(done.stdout)
    say(
        f"run {args.run_id}: step {told['step']} is committed: {', '.join(told['components'])}; {told['tensors']} tensors, "
        f"{told['size_bytes'] / 2**20:.1f} MiB"
    )
    if told["left_out"]:
        say(f"left out: {', '.join(told['left_out'])}")
    return 0


def _with_torch(module: str, words: list[str], store: str) -> subprocess.CompletedProcess[str]:
    """Run a module of the state room in a process of its own: this one never loads torch."""
    command = [sys.executable, "-m", f"torchrelay.state.{module}", *words]
    environ = {**settings(), **({"TORCHRELAY_STORE": store} if store else {})}
    return subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
