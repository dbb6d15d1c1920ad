"""Entry point of the image: read secrets from files, then become the command.

``NAME_FILE=/run/secrets/x`` becomes ``NAME=<content of the file>`` for the command, so that no credential stands in a compose
file, in the image or in ``docker inspect``. Other ``*_FILE`` variables (certificates, for instance) are left alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["main", "with_secrets"]

SECRETS_FOLDER = Path("/run/secrets")
_SUFFIX = "_FILE"


def with_secrets(environ: Mapping[str, str], folder: Path = SECRETS_FOLDER) -> dict[str, str]:
    """Return the environment with every ``NAME_FILE`` below ``folder`` replaced by ``NAME``.

    Raises OSError when such a file cannot be read, and ValueError when it is empty or ``NAME`` is set as well.
    """
    result = dict(environ)
    for name, value in environ.items():
        if not name.endswith(_SUFFIX) or folder not in Path(value).parents:
            continue
        target = name.removesuffix(_SUFFIX)
        if target in environ:
            raise ValueError(f"both {target} and {name} are set; keep one")
        secret = Path(value).read_text(encoding="utf-8").strip()
        if not secret:
            raise ValueError(f"{value} (from {name}) is empty; run `make secrets`")
        del result[name]
        result[target] = secret
    return result


def main(argv: list[str]) -> int:
    """Replace this process by ``argv``; return only when that is impossible."""
    if not argv:
        sys.stderr.write("no command given\n")
        return 64
    try:
        os.execvpe(argv[0], argv, with_secrets(os.environ))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error}\n")
        return 78


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
