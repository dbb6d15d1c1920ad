"""What all commands share: where the local settings lie, and how a table is shown."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["console", "find_home", "print_table", "read_env_file", "say", "settings"]

_STORE_GROUP = ("TORCHRELAY_STORE", "TORCHRELAY_S3_ENDPOINT", "TORCHRELAY_ACCESS_KEY", "TORCHRELAY_SECRET_KEY")


def find_home(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the local stack: TORCHRELAY_HOME, or the nearest ``.torchrelay`` upward from here, or one to be made here."""
    environment = os.environ if environ is None else environ
    if environment.get("TORCHRELAY_HOME"):
        return Path(environment["TORCHRELAY_HOME"]).absolute()
    here = Path.cwd()
    found = (folder / ".torchrelay" for folder in (here, *here.parents) if (folder / ".torchrelay").is_dir())
    return next(found, here / ".torchrelay")


def settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment, completed by what ``torchrelay up`` wrote down.

    The settings of the store belong together: if the environment has any of them, none is taken from the file, so that the address of one
    store never meets the keys of another.
    """
    environment = os.environ if environ is None else environ
    home = find_home(environment)
    written = read_env_file(home / "env")
    if any(name in environment for name in _STORE_GROUP):
        written = {name: value for name, value in written.items() if name not in _STORE_GROUP}
    return {**written, **environment, "TORCHRELAY_HOME": str(home)}


def read_env_file(path: Path) -> dict[str, str]:
    """Read NAME=VALUE lines; a file that is not there has none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to ``main``, which ends in silence; the default would exit with 1."""
        raise BrokenPipeError


@cache
def console() -> Console:
    """Return the console of stdout. Lines are never cut or wrapped where there is no terminal."""
    return _Console(soft_wrap=True, highlight=False, markup=False)


def say(text: str) -> None:
    """Print one line as it is, at once."""
    console().print(text)
    console().file.flush()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """Print a table; where there is no terminal, in aligned columns that other programs can cut. Numbers stand right."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    right = [bool(cells) and all(isinstance(row[index], int | float) for row in rows) for index in range(len(columns))]
    if console().is_terminal:
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for name, number in zip(columns, right, strict=True):
            table.add_column(name, justify="right" if number else "left", overflow="fold")
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        console().print(table)
        return
    if title:
        say(title)
    head = [list(columns)] if any(columns) else []
    widths = [max(len(row[index]) for row in [*head, *cells]) for index in range(len(columns))] if head or cells else []
    for row in [*head, *cells]:
        parts = [cell.rjust(w) if n else cell.ljust(w) for cell, w, n in zip(row, widths, right, strict=True)]
        say("  ".join(parts).rstrip())
