"""``torchrelay up`` and ``down``: object store, Prefect server and flows on this machine, without Docker and without a network.

Idempotent: what runs already is left alone, what fell is started again on the same data. Everything lies in one folder (``.torchrelay``): data,
logs, process ids, and ``env`` with addresses and generated keys, readable by its owner only. All listen on the loopback interface.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from torchrelay.attempt import default_sigint
from torchrelay.checkpoint.host import ProcessIdentity, this_process
from torchrelay.cli.console import find_home, print_table, read_env_file, say
from torchrelay.errors import ConfigError, NotFoundError, RetryableError, StoreAccessError, TorchrelayError
from torchrelay.store import RetryPolicy, open_store
from torchrelay.store.seaweed import SeaweedPorts, weed_command, weed_environment

__all__ = ["add_parsers", "down", "up"]

_BUCKET = "torchrelay"
_READY_S = 120.0
_STOP_S = {"flows": 150.0, "server": 20.0, "store": 30.0}  # flows wait for their launchers, which save first
_MAX_LOG_BYTES = 16 * 2**20
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Service:
    """One background process. ``ready`` is asked until it says yes."""

    name: str
    command: list[str]
    environ: dict[str, str]
    ready: Callable[[], bool]
    where: str
    cwd: Path

    @property
    def digest(self) -> str:
        """Changes when it would be started otherwise than the one that runs."""
        known = {**self.environ, "command": self.command, "cwd": str(self.cwd)}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


@dataclass(kw_only=True)
class _Stack:
    """What is written down about the stack of one folder: ports and keys, chosen once, and the processes."""

    home: Path
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
        return cls(home=home, ports=ports, keys=keys)

    def choose(self, *, prefect_port: int) -> None:
        """Fill in what is missing, and replace ports that somebody else has taken meanwhile."""
        if self.process("store") is None and not _all_free(self.ports, SeaweedPorts.__dataclass_fields__):
            self.ports.update(asdict(SeaweedPorts.choose()))
        if self.process("server") is None:
            wanted = self.ports.get("prefect", prefect_port)
            self.ports["prefect"] = wanted if _is_free(wanted) else _free_port()
        if not all(self.keys.values()):
            self.keys = {
                "TORCHRELAY_ACCESS_KEY": secrets.token_hex(10),
                "TORCHRELAY_SECRET_KEY": secrets.token_hex(20),
            }
        _write_private(self.home / "ports.json", json.dumps(self.ports))
        text = "# Written by `torchrelay up`. `set -a; . this-file` gives a shell the same settings.\n"
        _write_private(self.home / "env", text + "".join(f"{name}={value}\n" for name, value in self.environ.items()))

    @property
    def environ(self) -> dict[str, str]:
        """What a client of the stack needs to know."""
        return {
            "TORCHRELAY_STORE": f"s3://{_BUCKET}/relay",
            "TORCHRELAY_S3_ENDPOINT": f"http://127.0.0.1:{self.ports['s3']}",
            **self.keys,
            "PREFECT_API_URL": f"http://127.0.0.1:{self.ports['prefect']}/api",
        }

    def process(self, name: str) -> ProcessIdentity | None:
        """Return the live process of a service."""
        body = self._read(name)
        identity = ProcessIdentity.from_dict(body)
        if identity is None or identity.is_gone():
            return None
        here = this_process()
        # Another host, boot or container wrote this into a shared folder: not ours to judge, and surely not running here.
        return identity if (identity.boot, identity.namespace) == (here.boot, here.namespace) else None

    def digest(self, name: str) -> str:
        """Return how the running process was started."""
        return str(self._read(name).get("digest", ""))

    def remember(self, service: _Service, pid: int) -> None:
        """Write down a process."""
        body = {**this_process(pid).to_dict(), "digest": service.digest}
        _write_private(self._pid_file(service.name), json.dumps(body))

    def forget(self, name: str) -> None:
        """Take a process off the books."""
        self._pid_file(name).unlink(missing_ok=True)

    def log(self, name: str) -> Path:
        """Where a service's output goes."""
        return self.home / "logs" / f"{name}.log"

    def _pid_file(self, name: str) -> Path:
        return self.home / "pids" / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any]:
        try:
            body = json.loads(self._pid_file(name).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return body if isinstance(body, dict) else {}


def up(home: Path, *, port: int = 4200) -> int:
    """Start what does not run, wait until all of it works, and say where it is."""
    root = _project_root()
    with _locked(home):
        for folder in ("logs", "pids", "store", "prefect"):
            (home / folder).mkdir(exist_ok=True)
        stack = _Stack.load(home)
        stack.choose(prefect_port=port)
        services = _services(stack, root)
        started = [service.name for service in services if _ensure(stack, service)]
        rows = []
        for service in services:
            _await_ready(stack, service)
            process = stack.process(service.name)
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
            process = stack.process(name)
            if process is not None:
                say(
                    f"stopping {name} (pid {process.pid})" + (": runs save and commit first" if name == "flows" else "")
                )
                _stop(process, _STOP_S[name])
            stack.forget(name)
        if wipe:
            for folder in ("store", "prefect", "logs", "pids"):
                shutil.rmtree(home / folder, ignore_errors=True)
            for file in ("env", "ports.json"):
                (home / file).unlink(missing_ok=True)
            say("all data are deleted")
    return 0


def _services(stack: _Stack, root: Path) -> list[_Service]:
    home, ports, client = stack.home, stack.ports, stack.environ
    weed_ports = SeaweedPorts(**{name: ports[name] for name in SeaweedPorts.__dataclass_fields__})
    api, prefect = client["PREFECT_API_URL"], home / "prefect"
    common = {**_PRIVATE, "PREFECT_API_URL": api, "PREFECT_HOME": str(prefect), "PREFECT_LOGGING_LEVEL": "INFO"}
    began = time.time()
    return [
        _Service(
            name="store",
            command=weed_command(home / "store", weed_ports, bucket=_BUCKET),
            environ=weed_environment(
                access_key=stack.keys["TORCHRELAY_ACCESS_KEY"], secret_key=stack.keys["TORCHRELAY_SECRET_KEY"]
            ),
            ready=lambda: _store_works(client),
            where=f"{client['TORCHRELAY_STORE']} at {client['TORCHRELAY_S3_ENDPOINT']}",
            cwd=home / "store",
        ),
        _Service(
            name="server",
            # The server's own command would put a second process around this one.
            command=[
                *(sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"),
                *("--host", "127.0.0.1", "--port", str(ports["prefect"]), "--log-level", "warning"),
            ],
            environ={
                **common,
                "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{prefect}/prefect.db",
                "PREFECT_SERVER_UI_API_URL": api,
                "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(prefect / "ui"),
                "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
                "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P2D",
                "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
            },
            ready=lambda: _answers(f"{api}/ready"),
            where=api.removesuffix("/api"),
            cwd=prefect,
        ),
        _Service(
            name="flows",
            command=[sys.executable, "-m", "flows.serve"],
            environ={
                **common,
                **client,
                "TORCHRELAY_HOME": str(home),
                "PYTHONPATH": str(root),
                "PREFECT_RUNNER_POLL_FREQUENCY": "1",
                "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
                "PREFECT_CLIENT_MAX_RETRIES": "8",
            },
            ready=lambda: _is_polled(api, began if stack.process("flows") is None else 0.0),
            where="deployments train/train and train/nightly",
            cwd=root,
        ),
    ]


def _ensure(stack: _Stack, service: _Service) -> bool:
    """Start a service unless it runs as it should; returns whether it was started."""
    process = stack.process(service.name)
    if process is not None:
        if stack.digest(service.name) == service.digest:
            return False
        say(f"{service.name} runs with other settings: it is started again")
        _stop(process, _STOP_S[service.name])
    log = stack.log(service.name)
    if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    say(f"starting {service.name}")
    with log.open("ab") as output, default_sigint():
        child = subprocess.Popen(
            service.command,
            env={**_clean_environ(), **service.environ},
            cwd=service.cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    stack.remember(service, child.pid)
    return True


def _await_ready(stack: _Stack, service: _Service) -> None:
    deadline = time.monotonic() + _READY_S
    while not service.ready():
        hint = f"its log: {stack.log(service.name)}"
        if stack.process(service.name) is None:
            raise TorchrelayError(f"{service.name} ended while starting:\n{_tail(stack.log(service.name))}", hint=hint)
        if time.monotonic() > deadline:
            raise TorchrelayError(f"{service.name} is not ready after {_READY_S:.0f} s", hint=hint)
        time.sleep(0.1)


def _stop(process: ProcessIdentity, patience_s: float) -> None:
    """SIGTERM to the group, then SIGKILL when the time is over. Each service is its own session, so nobody else is hit."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while _group_lives(process.pid):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        _reap(process.pid)
        time.sleep(0.05)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # usually the child of an earlier `up`
        os.waitpid(pid, os.WNOHANG)


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


def _clean_environ() -> dict[str, str]:
    """Return the environment without settings of another Prefect server, and without keys that a service has no use for."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "AWS_")) and name not in ("TORCHRELAY_ACCESS_KEY", "TORCHRELAY_SECRET_KEY")
    }


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Let one ``up`` or ``down`` work at a time."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_private(path: Path, text: str) -> None:
    """Replace a file in one move; only its owner may read it."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    new.replace(path)


def _tail(path: Path) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
    except OSError:
        return ""


def _all_free(ports: Mapping[str, int], names: Iterator[str] | Mapping[str, Any]) -> bool:
    return all(name in ports and _is_free(ports[name]) and _is_free(ports[name] + 10000) for name in names)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
