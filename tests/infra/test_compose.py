"""The compose files, as docker-compose itself resolves them: pinned, closed, and started in the right order."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.credentials import write_credentials
from torchrelay.config import FaultSpec

ROOT = Path(__file__).resolve().parents[2]
MINIO = (
    "quay.io/minio/minio:RELEASE.2025-09-07T16-13-09Z"
    "@sha256:14cea493d9a34af32f524e538b8346cf79f3321eff8e708c1e2960462bd8936e"
)
OURS = "torchrelay:0.1.0"
VARIANTS = ("", "silo", "seaweedfs")
WORKERS = {"worker-control": "control", "host-a": "host-a", "host-b": "host-b"}
ONE_SHOTS = {"setup", "bucket", "store-volume"}

pytestmark = pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="docker-compose is not installed (root on Debian: make system)"
)


@functools.cache
def stack(variant: str = "") -> dict[str, Any]:
    """Return the stack with one override file, or none, as docker-compose understands it."""
    names = ["docker-compose.yml", *([f"docker-compose.{variant}.yml"] if variant else [])]
    command = ["docker-compose", *(part for name in names for part in ("-f", f"infra/{name}")), "config"]
    bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    tree: dict[str, Any] = yaml.safe_load(done.stdout)
    return tree


def services(variant: str = "") -> dict[str, dict[str, Any]]:
    """Return the services of a variant by name."""
    found: dict[str, dict[str, Any]] = stack(variant)["services"]
    return found


def environment() -> dict[str, str]:
    """Return every variable any service of any variant gets."""
    return {
        name: str(value)
        for variant in VARIANTS
        for service in services(variant).values()
        for name, value in service.get("environment", {}).items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_foreign_image_is_pinned_by_tag_and_digest(variant: str) -> None:
    """No image can change under us: each is ours, or named by tag and digest."""
    images = {name: service["image"] for name, service in services(variant).items() if service["image"] != OURS}
    assert set(images) == {"postgres", "store"}
    for image in images.values():
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image), image


def test_the_store_is_the_frozen_image_unless_overridden() -> None:
    """The default store is the last published MinIO image; each override names another product."""
    assert services()["store"]["image"] == MINIO
    assert "pgsty/silo" in services("silo")["store"]["image"]
    assert "chrislusf/seaweedfs" in services("seaweedfs")["store"]["image"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_prefect_page_is_published_and_only_on_loopback(variant: str) -> None:
    """Nothing can be reached from another machine, and the store not even from this one."""
    ports = {name: service["ports"] for name, service in services(variant).items() if service.get("ports")}
    assert set(ports) == {"prefect-server"}
    assert all(str(port).startswith("127.0.0.1:") for port in ports["prefect-server"])
    assert not any(service.get("network_mode") == "host" for service in services(variant).values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_store_and_database_have_no_way_out(variant: str) -> None:
    """Store and database sit alone on internal networks; only those who need them join."""
    assert stack(variant)["networks"]["store"] == {"internal": True}
    assert stack(variant)["networks"]["database"] == {"internal": True}
    members = {
        network: {name for name, service in services(variant).items() if network in service.get("networks", {})}
        for network in ("store", "database", "control")
    }
    assert members["store"] == {"store", "bucket", *WORKERS}
    assert members["database"] == {"postgres", "prefect-server"}
    assert members["control"] == {"prefect-server", "setup", *WORKERS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_service_is_hardened(variant: str) -> None:
    """Read-only root, no capabilities, no new privileges; only the volume's owner is set by root, without a network."""
    for name, service in services(variant).items():
        assert service["read_only"] is True, name
        assert service["init"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        if name == "store-volume":
            assert (service["user"], service["cap_add"], service["network_mode"]) == ("0:0", ["CHOWN"], "none")
        else:
            assert service.get("user", "") not in ("0", "root", "0:0"), name
            assert "cap_add" not in service, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_services_start_in_the_intended_order(variant: str) -> None:
    """Workers wait for the finished set-up and for a store that was measured; nothing waits for less."""
    graph = {
        name: {other: rule["condition"] for other, rule in service.get("depends_on", {}).items()}
        for name, service in services(variant).items()
    }
    done = "service_completed_successfully"
    workers = {name: {"setup": done, "bucket": done} for name in WORKERS}
    assert graph == {
        "postgres": {},
        "prefect-server": {"postgres": "service_healthy"},
        "setup": {"prefect-server": "service_healthy"},
        "store-volume": {},
        "store": {"store-volume": done},
        "bucket": {"store": "service_healthy"},
        **workers,
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_runs_for_long_is_watched_and_restarted(variant: str) -> None:
    """Servers and workers have a health check and come back; one-shots run once."""
    for name, service in services(variant).items():
        if name in ONE_SHOTS:
            assert service["restart"] == "no", name
        else:
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"][0] == "CMD", name
            assert service["healthcheck"]["start_period"], name


def test_workers_are_bound_to_their_own_queue() -> None:
    """A worker has a fixed name and one queue; hosts train one run at a time and get the time to save when stopped."""
    faults = FaultSpec()
    for name, queue in WORKERS.items():
        service = services()[name]
        command = service["command"]
        options = dict(itertools.pairwise(command))
        assert command[:3] == ["prefect", "worker", "start"]
        assert (options["--pool"], options["--work-queue"], options["--name"]) == ("hosts", queue, queue)
        assert options.get("--limit") == (None if name == "worker-control" else "1")
        assert "--with-healthcheck" in command
        assert int(service["stop_grace_period"].removesuffix("s")) > faults.grace_s + faults.drain_s


def test_workers_hold_only_the_scoped_key() -> None:
    """The root key of the store reaches the store and the one-shot that needs it, never a process that runs user code."""
    holders = {name for name, service in services().items() if "store_root" in str(service.get("secrets"))}
    assert holders == {"store", "bucket"}
    for name in WORKERS:
        assert {secret["source"] for secret in services()[name]["secrets"]} == {
            "training_access_key",
            "training_secret_key",
        }


@pytest.mark.parametrize("variant", VARIANTS)
def test_credentials_come_from_generated_files(variant: str, tmp_path: Path) -> None:
    """Every secret of the stack is a file that `make secrets` writes, in the folder git ignores."""
    write_credentials(tmp_path)
    for name, secret in stack(variant)["secrets"].items():
        path = Path(secret["file"])
        assert path.parent == ROOT / "infra" / "secrets"
        assert (tmp_path / path.name).is_file(), name
    ignored = subprocess.run(["git", "check-ignore", "-q", "infra/secrets/x"], cwd=ROOT, check=False)
    assert ignored.returncode == 0


def test_no_secret_stands_in_the_files() -> None:
    """Variables that name a credential hold the path of a secret, and the files hold no long random token."""
    for name, value in environment().items():
        if re.search(r"PASSWORD|SECRET|ACCESS_KEY|ROOT_USER|TOKEN", name):
            assert name.endswith("_FILE"), name
            assert value.startswith("/run/secrets/"), name
    for path in (ROOT / "infra").glob("docker-compose*.yml"):
        text = re.sub(r"sha256:[0-9a-f]{64}", "", path.read_text("utf-8"))
        assert not re.search(r"[0-9a-f]{20,}", text), path


def test_prefect_settings_exist() -> None:
    """Each PREFECT_ variable is a setting of the pinned Prefect: a misspelt one would be ignored in silence."""
    code = (
        "import sys; from prefect.settings import Settings; from prefect.settings.legacy import _get_settings_fields;"
        "known = _get_settings_fields(Settings); print(*[name for name in sys.argv[1:] if name not in known])"
    )
    secret = "_FILE"
    names = [name.removesuffix(secret) for name in environment() if name.startswith("PREFECT_")]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


def test_our_settings_exist() -> None:
    """Each TORCHRELAY_ variable is read somewhere in the library."""
    library = "".join(path.read_text("utf-8") for path in (ROOT / "training").rglob("*.py"))
    names = {name.removesuffix("_FILE") for name in environment() if name.startswith("TORCHRELAY_")}
    assert {name for name in names if name not in library} == set()


def test_modules_and_commands_exist() -> None:
    """Every command of our image is one it has: a console script, or a module of the checkout."""
    for name, service in services().items():
        command = service.get("command") or []
        if service["image"] != OURS or name == "store-volume":
            continue
        if command[0] == "python":
            assert importlib.util.find_spec(command[2]) is not None, command
        else:
            assert command[0] in ("prefect", "torchrelay"), command
            assert (Path(sys.executable).parent / command[0]).exists(), command


def test_worker_options_exist() -> None:
    """The options of the workers are those of the pinned Prefect."""
    prefect = [sys.executable, "-m", "prefect", "worker", "start", "--help"]
    shown = subprocess.run(prefect, capture_output=True, text=True, check=True, timeout=60).stdout
    used = {part for name in WORKERS for part in services()[name]["command"] if part.startswith("--")}
    assert {option for option in used if option not in shown} == set()


def test_the_store_moves_without_sharing_a_volume_it_cannot_read() -> None:
    """Silo takes over MinIO's volume, which has its format; SeaweedFS has a volume of its own, owned by its user."""

    def data_volumes(variant: str) -> set[str]:
        return {
            str(volume).split(":")[0]
            for name in ("store", "store-volume")
            for volume in services(variant)[name]["volumes"]
        }

    assert data_volumes("") == data_volumes("silo") == {"store-data"}
    assert data_volumes("seaweedfs") == {"seaweedfs-data"}
