"""The rank's end of the wire to its courier.

A background thread connects, listens and, when the courier has died and been started again, reconnects and hands over the snapshot in
flight once more: the staged bytes are still in shared memory, so a courier's death costs nothing. What was written but not yet committed
it is asked to commit. Never touches torch or the store.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrelay.state.wire import receive, send

__all__ = ["CourierLink"]

_LOG = logging.getLogger(__name__)


class CourierLink:
    """Sends staged snapshots to the courier at ``path`` and passes its answers to ``on_message`` (on the link's thread).

    ``on_lost`` is called when the courier cannot be reached, before each new try; a caller that owns the courier starts it again there.
    """

    def __init__(
        self, path: Path, *, on_message: Callable[[dict[str, Any]], None], on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._on_message, self._on_lost = path, on_message, on_lost
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._area: tuple[int, dict[str, Any]] | None = None
        self._in_flight: dict[str, Any] | None = None
        self._uncommitted: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier-link", daemon=True)
        self._thread.start()

    def use_area(self, fd: int, size: int, layout: dict[str, Any]) -> None:
        """Share the staging memory and say what lies where in it. Only while no snapshot is in flight."""
        with self._lock:
            self._area = (fd, {"type": "area", "size": size, "layout": layout})
            self._send(self._area[1], (fd,))

    def hand_over(self, message: dict[str, Any]) -> None:
        """Hand over a staged snapshot; it is in flight until ``done`` is called."""
        with self._lock:
            self._in_flight = message
            self._send(message)

    def done(self) -> None:
        """The courier has written the snapshot in flight (or refused it for good)."""
        with self._lock:
            self._in_flight = None

    def expect_commit(self, step: int | None) -> None:
        """This step is written and should be committed next, by whatever courier is there; None: nothing is expected."""
        with self._lock:
            self._uncommitted = step

    def close(self) -> None:
        """Say goodbye: the courier finishes what it has and exits by itself."""
        self._closing.set()
        with self._lock:
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5.0)

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if self._connection is None:
            return  # sent when the link is up
        try:
            send(self._connection, message, fds)
        except OSError:
            _LOG.warning("the courier went away while it was handed a %s", message["type"])

    def _run(self) -> None:
        while not self._closing.is_set():
            connection = self._connect()
            if connection is None:
                return
            with connection:
                self._listen(connection)
            with self._lock:
                self._connection = None

    def _connect(self) -> socket.socket | None:
        while not self._closing.is_set():
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(self._path))
            except OSError:
                connection.close()
                self._on_lost()
                self._closing.wait(0.05)
                continue
            with self._lock:
                self._connection = connection
                if self._area is not None:
                    self._send(self._area[1], (self._area[0],))
                if self._uncommitted is not None:
                    self._send({"type": "commit", "step": self._uncommitted})
                if self._in_flight is not None:
                    self._send(self._in_flight)
            return connection
        return None

    def _listen(self, connection: socket.socket) -> None:
        while True:
            try:
                received = receive(connection)
            except OSError:
                return
            if received is None:
                return
            self._on_message(received[0])
