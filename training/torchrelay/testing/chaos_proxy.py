"""A small HTTP proxy that misbehaves by rule: what a bad network or an overloaded server does to an S3 client, on demand.

Each connection carries one request. A rule applies to the next ``times`` requests of its method; requests without a rule pass through unharmed.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

__all__ = ["ChaosProxy", "Fault", "Rule"]

Fault = Literal[
    "none",
    "refuse",  # the connection is reset before a byte is read
    "unavailable",  # 503 with Retry-After, the server never sees the request
    "lost-reply",  # the server acts, the reply is dropped
    "reset-up",  # reset in the middle of the request's body
    "stall-up",  # the request's body is not read beyond its middle
    "flip-up",  # one bit of the request's body is flipped
    "reset-down",  # reset in the middle of the reply's body
    "truncate-down",  # the connection is closed in the middle of the reply's body
    "stall-down",  # nothing more comes after the middle of the reply's body
    "flip-down",  # one bit of the reply's body is flipped
]


@dataclass(slots=True)
class Rule:
    """What happens to the next ``times`` requests with this method (``*`` = any)."""

    method: str
    fault: Fault
    times: int = 1


class ChaosProxy:
    """Forwards to ``host:port``; a context manager. ``latency_s`` delays every request."""

    def __init__(self, endpoint: str, *, latency_s: float = 0.0) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self.latency_s = latency_s
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.served: list[tuple[str, Fault]] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._thread = threading.Thread(target=self._accept, name="chaos", daemon=True)

    @property
    def endpoint(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def add(self, method: str, fault: Fault, times: int = 1) -> None:
        """Queue a rule."""
        with self._lock:
            self._rules.append(Rule(method, fault, times))

    def clear(self) -> None:
        """Forget rules that were not used up."""
        with self._lock:
            self._rules.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._guard, args=(client,), daemon=True).start()

    def _guard(self, client: socket.socket) -> None:
        with client:
            try:
                self._serve(client)
            except OSError:
                return  # either side has gone: that is what this proxy is for

    def _fault_for(self, method: str) -> Fault:
        with self._lock:
            for rule in self._rules:
                if rule.method in ("*", method):
                    rule.times -= 1
                    if rule.times == 0:
                        self._rules.remove(rule)
                    self.served.append((method, rule.fault))
                    return rule.fault
            self.served.append((method, "none"))
            return "none"

    def _serve(self, client: socket.socket) -> None:
        head, rest = _read_head(client)
        if not head:
            return None
        method = head.split(b" ", 1)[0].decode()
        fault = self._fault_for(method)
        if self.latency_s:
            time.sleep(self.latency_s)
        if fault == "refuse":
            return _reset(client)
        if fault == "unavailable":
            client.sendall(
                b"HTTP/1.1 503 Slow Down\r\nRetry-After: 0\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            return None
        with socket.create_connection(self._target) as server:
            server.sendall(_closing_head(head))
            length = _content_length(head)
            if b"expect: 100-continue" in head.lower():
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if not self._pass(client, server, rest, length, fault=fault, way="up"):
                return None
            reply, body = _read_head(server)
            if fault == "lost-reply":
                _drain(server, _content_length(reply) - len(body))
                return _reset(client)
            client.sendall(_closing_head(reply))
            if method != "HEAD":
                self._pass(server, client, body, _content_length(reply), fault=fault, way="down")
        return None

    def _pass(
        self, source: socket.socket, sink: socket.socket, first: bytes, length: int, *, fault: Fault, way: str
    ) -> bool:
        """Copy a body of ``length`` bytes; False if the fault ended the connection. The fault strikes in the middle."""
        name, _, direction = fault.partition("-")
        strikes = direction == way and length > 0
        done, middle = 0, length // 2
        while done < length:
            data = first or source.recv(min(65536, length - done))
            first = b""
            if not data:
                return False
            if strikes and done <= middle < done + len(data):
                if name == "flip":
                    index = middle - done
                    data = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
                else:
                    sink.sendall(data[: middle - done])
                    self._strike(name, source, sink, way)
                    return False
            sink.sendall(data)
            done += len(data)
        return True

    def _strike(self, name: str, source: socket.socket, sink: socket.socket, way: str) -> None:
        client = source if way == "up" else sink
        ends: dict[str, Callable[[], object]] = {
            "reset": lambda: _reset(client),
            "truncate": client.close,
            "stall": lambda: self._closing.wait(60.0),
        }
        ends[name]()


def _read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return b"", b""
        data += part
    head, _, rest = data.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return (
            _read_head(connection)
            if not rest
            else (rest.partition(b"\r\n\r\n")[0] + b"\r\n\r\n", rest.partition(b"\r\n\r\n")[2])
        )
    return head + b"\r\n\r\n", rest


def _closing_head(head: bytes) -> bytes:
    """Make both sides close after this request, so that each request is a connection of its own."""
    lines = [
        line for line in head.removesuffix(b"\r\n\r\n").split(b"\r\n") if not line.lower().startswith(b"connection:")
    ]
    return b"\r\n".join([*lines, b"Connection: close"]) + b"\r\n\r\n"


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return int(line.split(b":", 1)[1])
    return 2**62 if b"transfer-encoding: chunked" in head.lower() or head.startswith(b"HTTP") else 0


def _drain(connection: socket.socket, length: int) -> None:
    while length > 0:
        part = connection.recv(min(65536, length))
        if not part:
            return
        length -= len(part)


def _reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
