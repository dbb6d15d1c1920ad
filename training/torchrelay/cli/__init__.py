"""The command line: ``torchrelay COMMAND``. Arguments beat the environment, which beats what ``torchrelay up`` wrote down."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from torchrelay.errors import TorchrelayError

__all__ = ["main"]

_MODULES = ("stack", "train", "inspect", "care", "export", "doctor", "demo")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors of ours become a message with a hint, never a traceback."""
    args = _parser().parse_args(argv)
    try:
        return int(args.handler(args))
    except TorchrelayError as error:
        print(f"torchrelay: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # `torchrelay runs | head`: the reader has had enough. The interpreter must not stumble over it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrelay",
        description="PyTorch training as a relay of retriable segments.",
        epilog="The store is TORCHRELAY_STORE, or what `torchrelay up` started; --store URL wins.",
    )
    parser.add_argument("--version", action="version", version=f"torchrelay {version('torchrelay')}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in _MODULES:
        importlib.import_module(f"{__name__}.{name}").add_parsers(subparsers)
    return parser
