"""A network with a known ceiling, in front of a server on this machine: latency each way, bytes per second per connection, refusals in bursts.

Loopback has no ceiling but the CPU, so it cannot show whether an engine overlaps, retries and uses its connections well; behind a shaper the
ratio to the raw client is stable. It runs in a process of its own and moves bytes with ``splice``, so that it costs little itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

__all__ = ["Shape", "Shaper", "shaped"]

_SPLICE_BYTES = 256 * 2**10
_REFUSAL = b"HTTP/1.1 503 Slow Down\r\nRetry-After: 0\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """``latency_s`` is added to each request and to each reply; ``rate_bytes_s`` caps each connection each way (0: no cap).

    Of every ``period`` requests the first ``burst`` are refused with 503 (0: none).
    """

    latency_s: float = 0.0
    rate_bytes_s: float = 0.0
    burst: int = 0
    period: int = 0


class Shaper:
    """The near end: where to connect, and how many bytes have passed."""

    def __init__(self, port: int, pipe: Connection) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self._pipe = pipe

    def passed(self) -> tuple[int, int]:
        """Bytes (to the server, from the server) so far, heads included."""
        self._pipe.send("passed")
        up, down = self._pipe.recv()
        return up, down


@contextlib.contextmanager
def shaped(endpoint: str, shape: Shape) -> Iterator[Shaper]:
    """Run a shaper in front of ``endpoint`` (``http://host:port``)."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, (host, int(port)), shape), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Shaper(ours.recv(), ours)
    finally:
        ours.close()
        process.terminate()
        process.join()


@dataclass(slots=True)
class _Counts:
    lock: threading.Lock = field(default_factory=threading.Lock)
    passed: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    requests: int = 0


def _serve(pipe: Connection, target: tuple[str, int], shape: Shape) -> None:
    counts = _Counts()
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    threading.Thread(target=_accept, args=(listener, target, shape, counts), daemon=True).start()
    pipe.send(listener.getsockname()[1])
    try:
        while pipe.recv():
            pipe.send((counts.passed["up"], counts.passed["down"]))
    except EOFError:
        return  # the benchmark has gone, and takes this process along


def _accept(listener: socket.socket, target: tuple[str, int], shape: Shape, counts: _Counts) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(target)
        for connection in (client, server):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = _Line(client=client, server=server, shape=shape, counts=counts)
        for way in ("up", "down"):
            threading.Thread(target=line.pump, args=(way,), daemon=True).start()


@dataclass(slots=True)
class _Line:
    """One connection; ``way`` is the direction of the bytes last seen, so that a change of it marks a new request or reply."""

    client: socket.socket
    server: socket.socket
    shape: Shape
    counts: _Counts
    way: str = ""

    def pump(self, way: str) -> None:
        """Move bytes one way until either side closes."""
        source, sink = (self.client, self.server) if way == "up" else (self.server, self.client)
        reader, writer = os.pipe()
        try:
            self._pump(way, source, sink, (reader, writer))
        except OSError:
            pass  # either side has gone
        finally:
            os.close(reader)
            os.close(writer)
            for connection in (source, sink):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _pump(self, way: str, source: socket.socket, sink: socket.socket, pipe: tuple[int, int]) -> None:
        reader, writer = pipe
        due, rate = 0.0, self.shape.rate_bytes_s
        while count := os.splice(source.fileno(), writer, _SPLICE_BYTES):
            now = time.monotonic()
            if self.way != way:
                self.way = way
                now += self._begin(way)
                if way == "up" and self._refuses(source, reader, count):
                    return
            if rate:
                due = max(due, now) + count / rate
                _pause(due)
            elif self.shape.latency_s:
                _pause(now)
            with self.counts.lock:
                self.counts.passed[way] += count
            while count:
                count -= os.splice(reader, sink.fileno(), count)

    def _begin(self, way: str) -> float:
        if way == "up":
            with self.counts.lock:
                self.counts.requests += 1
        return self.shape.latency_s

    def _refuses(self, source: socket.socket, reader: int, count: int) -> bool:
        """Answer 503 if this request falls into a burst; its body is read first, or the client would never see the answer."""
        shape = self.shape
        if not shape.period or (self.counts.requests - 1) % shape.period >= shape.burst:
            return False
        head, _, body = os.read(reader, count).partition(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        missing = length - len(body)
        while missing > 0 and (part := source.recv(min(missing, _SPLICE_BYTES))):
            missing -= len(part)
        source.sendall(_REFUSAL)
        return True


def _pause(until: float) -> None:
    """Sleep until a time of ``time.monotonic``: what a slower line would take."""
    wait = until - time.monotonic()
    if wait > 0:
        time.sleep(wait)
