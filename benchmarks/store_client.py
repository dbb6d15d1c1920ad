"""Client CPU per GiB of the S3 byte path, against obstore's, up and down: ``python -m benchmarks.store_client [--quick] [--server null|seaweed]``.

The server is another process (one that swallows PUTs and serves GETs from memory, or SeaweedFS); CPU time is this process's alone. Both
clients move the same objects with the same number of threads, turn by turn; each figure is the median of the turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import Bar, report
from torchrelay.store.s3 import S3Store
from torchrelay.store.s3_config import S3Config
from torchrelay.testing.servers import SeaweedServer

_OBJECT = 32 * 2**20
_THREADS = 4


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller turns")
    parser.add_argument("--server", choices=["null", "seaweed"], default="null")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    turns, objects = (5, 4) if args.quick else (7, 16)
    with _null_server() if args.server == "null" else _seaweed() as config:
        up, down = _compare(config, turns=turns, objects=objects)
    bars = [
        _bar("upload client CPU / obstore's, bodies unchecked on both sides", up, ("plain", "obstore"), 1.5),
        _bar(
            "upload client CPU / obstore's, bodies checked (CRC32C; obstore: SHA-256)",
            up,
            ("crc32c", "obstore_sha256"),
            1.5,
        ),
        _bar("download client CPU / obstore's", down, ("plain", "obstore"), 1.0),
    ]
    report("store_client" + ("" if args.server == "null" else "_seaweed"), bars, out=args.out)


def _bar(figure: str, seconds: dict[str, list[float]], pair: tuple[str, str], bar: float) -> Bar:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    detail = {f"{name}_cpu_s_per_gib": round(value, 3) for name, value in medians.items()}
    return Bar(figure=figure, value=round(medians[pair[0]] / medians[pair[1]], 3), bar=bar, detail=detail)


def _obstore(config: S3Config, *, unsigned: bool) -> Any:
    from obstore.store import S3Store as Obstore

    return Obstore(
        config.bucket,
        endpoint=config.endpoint,
        access_key_id=config.access_key,
        secret_access_key=config.secret_key,
        region=config.region,
        virtual_hosted_style_request=False,
        unsigned_payload=unsigned,
        client_options={"allow_http": True},
    )


def _compare(config: S3Config, *, turns: int, objects: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    import obstore

    ours, checked = S3Store(dataclasses.replace(config, checksum=False)), S3Store(config)
    theirs, signed = _obstore(config, unsigned=True), _obstore(config, unsigned=False)
    body = memoryview(bytearray(secrets.token_bytes(2**20) * (_OBJECT // 2**20)))
    frozen = bytes(body)  # obstore copies anything but bytes
    target = memoryview(bytearray(_OBJECT * _THREADS))
    keys = [f"k{index}" for index in range(objects)]

    def slot(key: str) -> memoryview:
        index = int(key[1:]) % _THREADS
        return target[index * _OBJECT : (index + 1) * _OBJECT]

    def get_theirs(key: str) -> None:
        slot(key)[:] = memoryview(obstore.get(theirs, key).bytes())

    puts: dict[str, Callable[[str], object]] = {
        "plain": lambda key: ours.put(key, body),
        "crc32c": lambda key: checked.put(key, body),
        "obstore": lambda key: obstore.put(theirs, key, frozen, use_multipart=False),
        "obstore_sha256": lambda key: obstore.put(signed, key, frozen, use_multipart=False),
    }
    gets: dict[str, Callable[[str], object]] = {
        "plain": lambda key: ours.get(key, into=slot(key)),
        "obstore": get_theirs,
    }
    up: dict[str, list[float]] = {name: [] for name in puts}
    down: dict[str, list[float]] = {name: [] for name in gets}
    with ThreadPoolExecutor(_THREADS) as executor:
        for turn in range(turns + 1):
            for calls, figures in ((puts, up), (gets, down)):
                for name, call in calls.items():
                    seconds = _cpu(executor, call, keys)
                    if turn:  # the first one pays for connections and imports
                        figures[name].append(seconds)
    return up, down


def _cpu(executor: ThreadPoolExecutor, call: Callable[[str], object], keys: list[str]) -> float:
    """CPU seconds per GiB of this process."""
    began = time.process_time()
    list(executor.map(call, keys))
    return (time.process_time() - began) / (len(keys) * _OBJECT / 2**30)


@contextmanager
def _seaweed() -> Iterator[S3Config]:
    with tempfile.TemporaryDirectory() as folder, SeaweedServer(Path(folder)) as server:
        environ = server.environ("bench")
        yield S3Config.parse(environ["TORCHRELAY_STORE"], environ)


@contextmanager
def _null_server() -> Iterator[S3Config]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    port = ours.recv()
    try:
        yield S3Config(endpoint=f"http://127.0.0.1:{port}", bucket="b", prefix="", access_key="a", secret_key="s")  # noqa: S106 - it checks nothing
    finally:
        process.terminate()
        process.join()


def _serve(pipe: object) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    pipe.send(listener.getsockname()[1])  # type: ignore[attr-defined]
    body = bytes(_OBJECT)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve_one, args=(connection, body), daemon=True).start()


def _serve_one(connection: socket.socket, body: bytes) -> None:
    sink = bytearray(2**20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            part = connection.recv(65536)
            if not part:
                return
            data += part
        head, _, data = data.partition(b"\r\n\r\n")
        lines = [line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:]]
        length = int(dict(line for line in lines if len(line) == 2).get(b"content-length", b"0")) - len(data)
        data = b""
        while length > 0:
            length -= connection.recv_into(sink, min(length, len(sink)))
        if head.startswith(b"PUT"):
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 0\r\n\r\n')
        else:
            stamp = b'ETag: "x"\r\nLast-Modified: Tue, 01 Sep 2026 10:00:00 GMT\r\n'
            connection.sendall(
                b"HTTP/1.1 206 Partial Content\r\n" if b"\nrange:" in head.lower() else b"HTTP/1.1 200 OK\r\n"
            )
            connection.sendall(
                stamp
                + b"Content-Length: %d\r\nContent-Range: bytes 0-%d/%d\r\n\r\n" % (len(body), len(body) - 1, len(body))
            )
            connection.sendall(body)


if __name__ == "__main__":
    os.environ.setdefault("OBSTORE_LOG", "error")
    main()
