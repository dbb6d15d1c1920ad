"""Sealed documents: how every small object (run, generation, lease, record, manifest, marker) is written.

Two lines of UTF-8 JSON. The first is ``{"format": "torchrelay/<kind>/<version>", "sha256": "<hex>"}``, the second is the body. The digest is over the
format's name, a line feed and exactly the bytes of the body, so a document proves itself. Later versions keep this envelope: a damaged
version number is told from a newer one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torchrelay.errors import ConfigError, CorruptionError
from torchrelay.store.base import Buffer

__all__ = ["FORMAT_VERSION", "seal", "unseal", "unseal_first"]

FORMAT_VERSION = 1


def seal(kind: str, body: Mapping[str, Any]) -> bytes:
    """Serialise a body of plain JSON values."""
    line = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    name = f"torchrelay/{kind}/{FORMAT_VERSION}"
    head = {"format": name, "sha256": _digest(name, line)}
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + line + b"\n"


def unseal(kind: str, data: Buffer, *, where: str) -> dict[str, Any]:
    """Return the body. Raises CorruptionError for anything but an intact document of this kind, and ConfigError if a newer version wrote it."""
    lines = bytes(data).split(b"\n", 2)
    body, _ = _open(kind, lines[0], lines[1] if len(lines) > 1 else b"", where=where)
    if len(lines) > 2 and lines[2]:
        raise CorruptionError(f"{where} is damaged: it goes on after its end")
    return body


def unseal_first(kind: str, data: Buffer, *, where: str) -> tuple[dict[str, Any], str, bytes]:
    """Return the body of the document that ``data`` begins with, its digest, and the bytes after it. Raises as ``unseal`` does."""
    lines = bytes(data).split(b"\n", 2)
    if len(lines) < 3:
        raise CorruptionError(f"{where} is not a torchrelay {kind} document")
    return *_open(kind, lines[0], lines[1], where=where), lines[2]


def _open(kind: str, head_line: bytes, line: bytes, *, where: str) -> tuple[dict[str, Any], str]:
    try:
        head = json.loads(head_line)
        written, digest = str(head["format"]), str(head["sha256"])
        name, found_kind, version = written.split("/")
        number = int(version)
    except (ValueError, KeyError, TypeError):
        raise CorruptionError(f"{where} is not a torchrelay {kind} document") from None
    if _digest(written, line) != digest:
        raise CorruptionError(f"{where} is damaged: its SHA-256 does not match its content")
    if name != "torchrelay" or found_kind != kind:
        raise CorruptionError(f"{where} holds a {written!r}, expected a {kind}")
    if number > FORMAT_VERSION:
        raise ConfigError(
            f"{where} was written in format version {number}; this torchrelay reads up to {FORMAT_VERSION}",
            hint="pip install --upgrade torchrelay",
        )
    try:
        body = json.loads(line)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise CorruptionError(f"{where} has no JSON object as its body")
    return body, digest


def _digest(name: str, line: bytes) -> str:
    return hashlib.sha256(name.encode() + b"\n" + line).hexdigest()
