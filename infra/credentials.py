"""Generate, once, the credentials of ``docker-compose.yml`` as files in ``infra/secrets`` (ignored by git).

Existing files are never changed, so running it again is harmless and data stay readable. Only the standard library is used:
it runs before anything is installed. The folder is closed to other users of this machine (0700); the files in it are readable
(0444) because each container reads them under its own user id.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

__all__ = ["BUCKET", "write_credentials"]

BUCKET = "torchrelay"
FOLDER = Path(__file__).resolve().parent / "secrets"

# Name of the file -> bytes of entropy. Access keys of S3 servers may have 20 characters, secrets 40.
_TOKENS = {
    "postgres_password": 24,
    "store_root_user": 10,
    "store_root_password": 20,
    "training_access_key": 10,
    "training_secret_key": 20,
}


def write_credentials(folder: Path = FOLDER) -> list[str]:
    """Write the credentials that are missing; return their names."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    missing = [name for name in _TOKENS if not (folder / name).exists()]
    for name in missing:
        _write(folder / name, secrets.token_hex(_TOKENS[name]))
    _write(folder / "seaweedfs_s3.json", json.dumps(_seaweedfs_identities(folder), indent=2))
    return missing


def _seaweedfs_identities(folder: Path) -> dict[str, object]:
    """SeaweedFS has no MinIO admin API: it reads both keys, and what the second may do, from a file."""

    def identity(name: str, user: str, password: str, actions: list[str]) -> dict[str, object]:
        keys = {"accessKey": (folder / user).read_text("utf-8"), "secretKey": (folder / password).read_text("utf-8")}
        return {"name": name, "credentials": [keys], "actions": actions}

    everything = ["Admin", "Read", "Write", "List", "Tagging"]
    scoped = [f"{action}:{BUCKET}" for action in ("Read", "Write", "List")]
    return {
        "identities": [
            identity("root", "store_root_user", "store_root_password", everything),
            identity("training", "training_access_key", "training_secret_key", scoped),
        ]
    }


def _write(path: Path, text: str) -> None:
    """Write the whole file or nothing, so that an interrupted run leaves no half credential behind."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.chmod(0o444)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    written = write_credentials()
    sys.stdout.write(f"{FOLDER}: wrote {', '.join(written)}\n" if written else f"{FOLDER}: complete, nothing changed\n")
