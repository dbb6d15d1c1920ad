"""The set-up service against a real Prefect server: queues and deployments appear once, and a quarantined host stays out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.conftest import PrefectServer, prefect_server

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """A server of this file's own: its pool and queues are what is looked at."""
    with prefect_server(tmp_path_factory.mktemp("setup")) as running:
        yield running


def set_up(server: PrefectServer, *hosts: str) -> subprocess.CompletedProcess[str]:
    """Run the service as the stack does."""
    command = [sys.executable, "-m", "infra.setup", *hosts]
    environ = {**os.environ, **server.environ}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=150)


def ask(server: PrefectServer, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Call the server's API and return what it answers."""
    data = json.dumps(body or {}).encode() if method != "GET" else None
    request = urllib.request.Request(
        f"{server.url}{path}", data=data, method=method, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        text = response.read()
    return json.loads(text) if text else None


def test_hosts_and_flows_are_known_once_however_often_it_runs(server: PrefectServer) -> None:
    """Every start of the stack runs it: the second run adds what is new, repeats nothing and releases nobody."""
    first = set_up(server, "host-a")
    assert first.returncode == 0, first.stderr
    ask(server, "PATCH", "/work_pools/hosts/queues/host-a", {"is_paused": True})
    second = set_up(server, "host-a", "host-b")
    assert second.returncode == 0, second.stderr
    queues = {queue["name"]: queue for queue in ask(server, "POST", "/work_pools/hosts/queues/filter")}
    limits = {name: queue["concurrency_limit"] for name, queue in queues.items() if name != "default"}
    assert limits == {"control": None, "host-a": 1, "host-b": 1}
    assert queues["host-a"]["is_paused"]
    assert not queues["host-b"]["is_paused"]
    wanted = {item["name"] for item in yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))["deployments"]}
    deployed = ask(server, "POST", "/deployments/filter")
    assert sorted(item["name"] for item in deployed) == sorted(wanted)
    assert {item["work_queue_name"] for item in deployed} <= set(limits)
    assert {item["work_pool_name"] for item in deployed} == {"hosts"}


def test_no_host_is_a_usage_error(server: PrefectServer) -> None:
    """A stack without hosts is a mistake in the compose file."""
    assert set_up(server).returncode == 64
