"""Real object stores for tests, started from PyPI wheels on free loopback ports with credentials of their own.

``SeaweedServer`` keeps conditional writes; ``JuiceGateway`` is MinIO's own front end over a folder and ignores them, which a probe must find out.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from torchrelay.errors import RetryableError, StoreAccessError, TorchrelayError
from torchrelay.store import RetryPolicy, open_store
from torchrelay.store.base import ObjectStore
from torchrelay.store.seaweed import SeaweedPorts, weed_command, weed_environment

__all__ = ["JuiceGateway", "SeaweedServer", "wait_ready"]


class _Server:
    """One server process with its folder; a context manager."""

    bucket = "ckpt"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.access_key, self.secret_key = secrets.token_hex(8), secrets.token_hex(16)
        self._ports = SeaweedPorts.choose()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """URL of the S3 interface."""
        return f"http://127.0.0.1:{self._ports.s3}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def environ(self, prefix: str = "t") -> dict[str, str]:
        """Settings with which ``open_store("")`` opens this server."""
        return {
            "TORCHRELAY_STORE": f"s3://{self.bucket}/{prefix}",
            "TORCHRELAY_S3_ENDPOINT": self.endpoint,
            "TORCHRELAY_ACCESS_KEY": self.access_key,
            "TORCHRELAY_SECRET_KEY": self.secret_key,
        }

    def open(self, prefix: str = "t", *, policy: RetryPolicy | None = None, endpoint: str = "") -> ObjectStore:
        """Open a prefix of the bucket, optionally through a proxy."""
        environ = self.environ(prefix)
        return open_store("", environ={**environ, "TORCHRELAY_S3_ENDPOINT": endpoint or self.endpoint}, policy=policy)

    def start(self) -> Self:
        """Start (or start again, on the same ports and data) and wait until a PUT and a GET work."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                env={**os.environ, **self._environment()},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_ready(self.open("canary"), process=self._process, log=self.folder / "server.log")
        return self

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after ten seconds."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        raise NotImplementedError


class SeaweedServer(_Server):
    """SeaweedFS in one process."""

    def _command(self) -> list[str]:
        return weed_command(self.folder, self._ports, bucket=self.bucket)

    def _environment(self) -> dict[str, str]:
        return weed_environment(access_key=self.access_key, secret_key=self.secret_key)


class JuiceGateway(_Server):
    """JuiceFS' gateway: MinIO's S3 front end, without conditional writes."""

    def _command(self) -> list[str]:
        meta = f"sqlite3://{self.folder}/meta.db"
        binary = (
            str(Path(sys.executable).parent / "juicefs")
            if (Path(sys.executable).parent / "juicefs").exists()
            else shutil.which("juicefs")
        )
        assert binary, "juicefs is not installed"
        if not (self.folder / "meta.db").exists():
            command = [
                binary,
                "format",
                "--storage",
                "file",
                "--bucket",
                f"{self.folder}/data/",
                "--trash-days",
                "0",
                meta,
                "vol",
            ]
            subprocess.run(command, check=True, capture_output=True)
        address = f"127.0.0.1:{self._ports.s3}"
        return [
            *(
                binary,
                "gateway",
                "--no-usage-report",
                "--no-banner",
                "--multi-buckets",
                "--keep-etag",
                "--object-tag",
                "--object-meta",
            ),
            *("--cache-size", "0", "--cache-dir", f"{self.folder}/cache", "--log", f"{self.folder}/gateway.log"),
            *("--metrics", f"127.0.0.1:{self._ports.master}", meta, address),
        ]

    def _environment(self) -> dict[str, str]:
        return {"MINIO_ROOT_USER": self.access_key, "MINIO_ROOT_PASSWORD": self.secret_key}


def wait_ready(
    store: ObjectStore,
    *,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Wait until a canary can be written and read back: an open port, or even a listing, does not mean that a store works."""
    deadline = time.monotonic() + timeout_s
    inner = getattr(store, "inner", store)
    while True:
        try:
            ensure = getattr(inner, "ensure_bucket", None)
            if ensure is not None:
                ensure()
            inner.put("canary", b"tweet")
            if bytes(inner.get("canary")) == b"tweet":
                return
        except (RetryableError, StoreAccessError) as error:
            last: Exception = error
            if process is not None and process.poll() is not None:
                tail = log.read_text(errors="replace")[-2000:] if log else ""
                raise TorchrelayError(f"the server ended with code {process.returncode}: {tail}") from None
            if time.monotonic() > deadline:
                raise TorchrelayError(f"the store is not ready after {timeout_s:.0f} s: {last}") from None
        time.sleep(0.05)
