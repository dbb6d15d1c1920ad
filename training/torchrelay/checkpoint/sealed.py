"""Sealed documents: how every small object (run, generation, lease, record, manifest, marker) is written.

Two lines of UTF-8 JSON. The first is ``{"format": "torchrelay/<kind>/<version>", "sha256": "<hex>"}``; the second is the body,
and the digest is over exactly its bytes (without the line feed). So a document proves itself, whatever re-serialises it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torchrelay.errors import ConfigError, CorruptionError
from torchrelay.store.base import Buffer

__all__ = ["FORMAT_VERSION", "seal", "unseal"]

FORMAT_VERSION = 1


def seal(kind: str, body: Mapping[str, Any]) -> bytes:
    """Serialise a body of plain JSON values."""
    line = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    head = {"format": f"torchrelay/{kind}/{FORMAT_VERSION}", "sha256": hashlib.sha256(line).hexdigest()}
    return json.dumps(head, separators=(",", ":")).encode() + b"\n" + line + b"\n"


def unseal(kind: str, data: Buffer, *, where: str) -> dict[str, Any]:
    """Return the body. Raises CorruptionError for anything but an intact document of this kind, and ConfigError if a newer version wrote it."""
    head_line, _, rest = bytes(data).partition(b"\n")
    line = rest.removesuffix(b"\n")
    try:
        head = json.loads(head_line)
        name, found_kind, version = str(head["format"]).split("/")
        number, digest = int(version), str(head["sha256"])
    except (ValueError, KeyError, TypeError):
        raise CorruptionError(f"{where} is not a torchrelay {kind} document") from None
    if name != "torchrelay" or found_kind != kind:
        raise CorruptionError(f"{where} holds a {head['format']!r}, expected a {kind}")
    if number > FORMAT_VERSION:
        raise ConfigError(
            f"{where} was written in format version {number}; this torchrelay reads up to {FORMAT_VERSION}",
            hint="pip install --upgrade torchrelay",
        )
    if hashlib.sha256(line).hexdigest() != digest:
        raise CorruptionError(f"{where} is damaged: its SHA-256 does not match its body")
    body = json.loads(line)
    if not isinstance(body, dict):
        raise CorruptionError(f"{where} has no JSON object as its body")
    return body
