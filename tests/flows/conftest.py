"""A real Prefect server for the tests of the flows, one per session: uvicorn on a free port over a copy of a migrated database."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.flow_runs import Flow
from tests.waiting import wait_until

_TEMPLATES = Path(sys.prefix) / "test-templates"  # beside the packages they were made by; gone with them
_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "false",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
}


class PrefectServer:
    """A server that can be stopped and started again on the same port and database."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs to use this server."""
        return {
            **_QUIET,
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": self.url,
            "PREFECT_PROFILES_PATH": str(self.home / "none"),
        }

    def start(self) -> None:
        """Start it and wait until its database answers."""
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "--factory",
            "prefect.server.api.server:create_app",
            "--host",
            "127.0.0.1",
        ]
        with (self.home / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), "--log-level", "warning"],
                env={
                    **os.environ,
                    **self.environ,
                    "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{self.home}/prefect.db",
                },
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
            )
        wait_until(self._ready, timeout_s=90, what="the Prefect server")

    def stop(self) -> None:
        """Stop it as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError((self.home / "server.log").read_text())
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def _template() -> Path:
    """A migrated SQLite database, made once per installed version (12 s) and copied afterwards."""
    path = _TEMPLATES / f"prefect-{version('prefect')}.db"
    if not path.exists():
        _TEMPLATES.mkdir(parents=True, exist_ok=True)
        scratch = _TEMPLATES / f"making-{os.getpid()}"
        scratch.mkdir()
        database = f"sqlite+aiosqlite:///{scratch}/prefect.db"
        environ = {
            **os.environ,
            **_QUIET,
            "PREFECT_HOME": str(scratch),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        }
        command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=120, cwd=scratch)
        (scratch / "prefect.db").rename(path)
        shutil.rmtree(scratch)
    return path


@contextmanager
def prefect_server(home: Path) -> Iterator[PrefectServer]:
    """Run a server of one's own, for tests that stop it."""
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(_template(), home / "prefect.db")
    server = PrefectServer(home)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """The server all tests of a session share."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as server:
        yield server
        _drain()


def _drain() -> None:
    """Let Prefect's background threads deliver before their server goes; at exit they would try for a minute."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=10)
    EventsWorker.drain_all(timeout=10)


@pytest.fixture
def server(session_server: PrefectServer) -> Iterator[PrefectServer]:
    """The shared server, with Prefect's settings of this test pointing at it."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_HOME,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    with temporary_settings(
        {
            PREFECT_API_URL: session_server.url,
            PREFECT_HOME: session_server.home,
            PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False,
        }
    ):
        yield session_server


@pytest.fixture
def flow(server: PrefectServer) -> Flow:
    """Flows, with the server that all tests of the session share."""
    return Flow(server.environ)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A local folder as the store."""
    return f"file://{tmp_path / 'store'}"
