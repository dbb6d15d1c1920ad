"""``torchrelay up`` and ``down``: object store, Prefect server and flows on this machine, without Docker and without a network.

Idempotent: what runs already is left alone, what fell is started again on the same data. Everything lies in one folder (``.torchrelay``): data,
logs, process ids, and ``env`` with addresses and generated keys, readable by its owner only. All listen on the loopback interface.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import secrets
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from torchrelay.cli.console import find_home, print_table, read_env_file, say
from torchrelay.cli.services import Books, Service, await_ready, ensure, stop, write_private
from torchrelay.errors import ConfigError, NotFoundError, RetryableError, StoreAccessError
from torchrelay.store import RetryPolicy, open_store
from torchrelay.store.seaweed import SeaweedPorts, is_port_free, weed_command, weed_environment

__all__ = ["add_parsers", "down", "up"]

_BUCKET = "torchrelay"
_STOP_S = {"flows": 150.0, "server": 20.0, "store": 30.0}  # flows wait for their launchers, which save first
_PRIVATE = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
}


def add_parsers(subparsers: Any) -> None:
    """Add ``up`` and ``down``."""
    parser = subparsers.add_parser("up", help="start object store, Prefect server and flows here", description=__doc__)
    parser.add_argument(
        "--port", type=int, default=4200, help="port of the Prefect page (default: 4200, or a free one)"
    )
    parser.set_defaults(handler=lambda args: up(find_home(), port=args.port))
    parser = subparsers.add_parser("down", help="stop what `up` started; its data stay", description=__doc__)
    parser.add_argument("--wipe", action="store_true", help="delete all data too: every run and every checkpoint")
    parser.set_defaults(handler=_down)


def _down(args: argparse.Namespace) -> int:
    return down(find_home(), wipe=args.wipe)


@dataclass(kw_only=True)
class _Stack:
    """The stack of one folder: ports and keys, chosen once, and the books of its processes."""

    home: Path
    books: Books
    ports: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, home: Path) -> _Stack:
        known = read_env_file(home / "env")
        try:
            ports = json.loads((home / "ports.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            ports = {}
        keys = {name: known.get(name, "") for name in ("TORCHRELAY_ACCESS_KEY", "TORCHRELAY_SECRET_KEY")}
        return cls(home=home, books=Books(home), ports=ports, keys=keys)

    def choose(self, *, prefect_port: int) -> None:
        """Fill in what is missing, and replace ports that somebody else has taken meanwhile."""
        if self.books.process("store") is None and not _all_free(self.ports, SeaweedPorts.__dataclass_fields__):
            self.ports.update(asdict(SeaweedPorts.choose()))
        if self.books.process("server") is None:
            wanted = self.ports.get("prefect", prefect_port)
            self.ports["prefect"] = wanted if is_port_free(wanted) else _free_port()
        if not all(self.keys.values()):
            self.keys = {
                "TORCHRELAY_ACCESS_KEY": secrets.token_hex(10),
                "TORCHRELAY_SECRET_KEY": secrets.token_hex(20),
            }
        write_private(self.home / "ports.json", json.dumps(self.ports))
        text = "# Written by `torchrelay up`. `set -a; . this-file` gives a shell the same settings.\n"
        write_private(self.home / "env", text + "".join(f"{name}={value}\n" for name, value in self.environ.items()))

    @property
    def environ(self) -> dict[str, str]:
        """What a client of the stack needs to know."""
        return {
            "TORCHRELAY_STORE": f"s3://{_BUCKET}/relay",
            "TORCHRELAY_S3_ENDPOINT": f"http://127.0.0.1:{self.ports['s3']}",
            **self.keys,
            "PREFECT_API_URL": f"http://127.0.0.1:{self.ports['prefect']}/api",
        }


def up(home: Path, *, port: int = 4200) -> int:
    """Start what does not run, wait until all of it works, and say where it is."""
    root = _project_root()
    with _locked(home):
        for folder in ("logs", "pids", "store", "prefect"):
            (home / folder).mkdir(exist_ok=True)
        stack = _Stack.load(home)
        stack.choose(prefect_port=port)
        services = _services(stack, root)
        started = [service.name for service in services if ensure(stack.books, service)]
        rows = []
        for service in services:
            await_ready(stack.books, service)
            process = stack.books.process(service.name)
            state = "started" if service.name in started else "was running"
            rows.append([service.name, state, str(process.pid) if process else "", service.where])
    print_table(["service", "", "pid", "where"], rows)
    say(f"settings and keys: {home / 'env'}; logs: {home / 'logs'}")
    say("next: torchrelay train --run-id my-run; torchrelay runs; torchrelay down")
    return 0


def down(home: Path, *, wipe: bool = False) -> int:
    """Stop everything, flows first: they save and commit, which needs the store. With ``wipe`` the data go too."""
    if not home.is_dir():
        say("nothing is running here")
        return 0
    with _locked(home):
        stack = _Stack.load(home)
        for name in ("flows", "server", "store"):
            process = stack.books.process(name)
            if process is not None:
                say(
                    f"stopping {name} (pid {process.pid})" + (": runs save and commit first" if name == "flows" else "")
                )
                stop(process, _STOP_S[name])
            stack.books.forget(name)
        if wipe:
            for folder in ("store", "prefect", "logs", "pids"):
                shutil.rmtree(home / folder, ignore_errors=True)
            for file in ("env", "ports.json"):
                (home / file).unlink(missing_ok=True)
            say("all data are deleted")
    return 0


def _services(stack: _Stack, root: Path) -> list[Service]:
    return [_store_service(stack), _server_service(stack), _flows_service(stack, root)]


def _store_service(stack: _Stack) -> Service:
    client, folder = stack.environ, stack.home / "store"
    ports = SeaweedPorts(**{name: stack.ports[name] for name in SeaweedPorts.__dataclass_fields__})
    return Service(
        name="store",
        command=weed_command(folder, ports, bucket=_BUCKET),
        environ=weed_environment(
            access_key=stack.keys["TORCHRELAY_ACCESS_KEY"], secret_key=stack.keys["TORCHRELAY_SECRET_KEY"]
        ),
        ready=lambda: _store_works(client),
        where=f"{client['TORCHRELAY_STORE']} at {client['TORCHRELAY_S3_ENDPOINT']}",
        cwd=folder,
        stop_s=_STOP_S["store"],
    )


def _server_service(stack: _Stack) -> Service:
    api, folder = stack.environ["PREFECT_API_URL"], stack.home / "prefect"
    return Service(
        name="server",
        # The server's own command would put a second process around this one.
        command=[
            *(sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"),
            *("--host", "127.0.0.1", "--port", str(stack.ports["prefect"]), "--log-level", "warning"),
        ],
        environ={
            **_prefect_environ(stack),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder}/prefect.db",
            "PREFECT_SERVER_UI_API_URL": api,
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(folder / "ui"),
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P2D",
            "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
        },
        ready=lambda: _answers(f"{api}/ready"),
        where=api.removesuffix("/api"),
        cwd=folder,
        stop_s=_STOP_S["server"],
    )


def _flows_service(stack: _Stack, root: Path) -> Service:
    api = stack.environ["PREFECT_API_URL"]
    # A server remembers for a while that an earlier process asked for runs; only asking again counts.
    since_s = time.time() if stack.books.process("flows") is None else 0.0
    return Service(
        name="flows",
        command=[sys.executable, "-m", "flows.serve"],
        environ={
            **_prefect_environ(stack),
            **stack.environ,
            "TORCHRELAY_HOME": str(stack.home),
            "PYTHONPATH": str(root),
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_CLIENT_MAX_RETRIES": "8",
        },
        ready=lambda: _is_polled(api, since_s),
        where="deployments train/train, train/nightly and upkeep/upkeep",
        cwd=root,
        stop_s=_STOP_S["flows"],
    )


def _prefect_environ(stack: _Stack) -> dict[str, str]:
    return {
        **_PRIVATE,
        "PREFECT_API_URL": stack.environ["PREFECT_API_URL"],
        "PREFECT_HOME": str(stack.home / "prefect"),
        "PREFECT_LOGGING_LEVEL": "INFO",
    }


def _store_works(client: Mapping[str, str]) -> bool:
    """Whether a canary can be written and read: an open port does not mean that a store works."""
    store = open_store("", environ=client, policy=RetryPolicy(base_s=0.5))
    try:
        store.put("probe/up", b"canary")
        return bytes(store.get("probe/up")) == b"canary"
    except (RetryableError, StoreAccessError, NotFoundError):
        return False


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _is_polled(api: str, since_s: float) -> bool:
    """Whether somebody asks for runs of the deployment: only then is a flow run started soon."""
    try:
        with urllib.request.urlopen(f"{api}/deployments/name/train/train", timeout=5) as reply:
            polled = json.load(reply).get("last_polled")
    except (urllib.error.URLError, OSError, ValueError):
        return False
    return bool(polled) and datetime.fromisoformat(polled.replace("Z", "+00:00")).timestamp() >= since_s


def _project_root() -> Path:
    """Return the folder with the flows: upward from here, or where this package was installed from."""
    import importlib.util

    if importlib.util.find_spec("prefect") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError(
            "Prefect is not installed", hint="pip install 'torchrelay[flows,local]'; or train with --local"
        )
    here = Path.cwd()
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if (folder / "flows" / "serve.py").is_file():
            return folder
    raise ConfigError(
        "no flows/serve.py here or above", hint="run this in a clone of torchrelay, or train with --local"
    )


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Let one ``up`` or ``down`` work at a time."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _all_free(ports: Mapping[str, int], names: Iterator[str] | Mapping[str, Any]) -> bool:
    return all(name in ports and is_port_free(ports[name]) and is_port_free(ports[name] + 10000) for name in names)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
