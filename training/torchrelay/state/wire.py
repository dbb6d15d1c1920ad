"""Messages between a rank and its courier over a Unix socket: length-prefixed JSON, file descriptors beside the length.

Local and private to one user (the socket lies in a 0700 folder), so framing and nothing more. No torch.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

__all__ = ["receive", "send"]

_HEADER = 8


def send(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message; ``fds`` are duplicated into the receiver."""
    body = json.dumps(message, separators=(",", ":")).encode()
    header = len(body).to_bytes(_HEADER, "little")
    sent = socket.send_fds(connection, [header], list(fds)) if fds else connection.send(header)
    connection.sendall(header[sent:] + body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message and its file descriptors; None when the peer has closed."""
    header, fds, _, _ = socket.recv_fds(connection, _HEADER, 1)
    header += _exactly(connection, _HEADER - len(header)) if header else b""
    if len(header) < _HEADER:
        return None
    size = int.from_bytes(header, "little")
    body = _exactly(connection, size)
    return (json.loads(body), list(fds)) if len(body) == size else None


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 2**20))
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
