"""``torchrelay export``: one checkpoint as a file that other programs read, written tensor by tensor and checked on the way."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.export import export_safetensors
from torchrelay.cli.console import say, settings
from torchrelay.cli.inspect import add_run_arguments, choose_checkpoint, open_run_of
from torchrelay.errors import ConfigError, TorchrelayError

__all__ = ["add_parsers"]


def add_parsers(subparsers: Any) -> None:
    """Add ``export``."""
    parser = subparsers.add_parser("export", help="write a checkpoint to a file", description=__doc__)
    add_run_arguments(parser)
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    parser.add_argument(
        "--format",
        choices=["safetensors", "torch"],
        default="safetensors",
        help="safetensors: the model's weights under their own names; torch: the whole state, for torch.load(weights_only=True)",
    )
    parser.add_argument("--component", default="model", help="which component safetensors takes, for instance ema")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN-step-N.safetensors or .pt, here")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.set_defaults(handler=_export)


def _export(args: argparse.Namespace) -> int:
    store, _ = open_run_of(args)
    ref = choose_checkpoint(store, args.run, args.step)
    suffix = "pt" if args.format == "torch" else "safetensors"
    output = args.output or Path(f"{args.run}-step-{ref.step}.{suffix}")
    if output.exists() and not args.force:
        raise ConfigError(f"{output} exists", hint="--force replaces it, --output names another file")
    if args.format == "safetensors":
        count = export_safetensors(store, args.run, ref, output, component=args.component)
        say(f"{output}: {count} tensors of {args.component!r} at step {ref.step}, every byte checked")
        return 0
    # In a process of its own: this one never loads torch.
    command = [sys.executable, "-m", "torchrelay.state.export", args.run, str(ref), str(output)]
    environ = {**settings(), **({"TORCHRELAY_STORE": args.store} if args.store else {})}
    done = subprocess.run(command, env=environ, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise TorchrelayError(f"export failed: {done.stderr.strip().removeprefix('torchrelay: ')}")
    say(
        f"{output}: the whole state at step {ref.step}, every byte checked; torch.load({str(output)!r}, weights_only=True)"
    )
    return 0
