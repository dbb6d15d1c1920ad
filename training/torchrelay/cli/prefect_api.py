"""The few calls of Prefect's REST API that the command line needs, without loading Prefect (a second and a half)."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrelay.config import TrainSpec, spec_to_dict
from torchrelay.errors import ConfigError, NotFoundError, RetryableError

__all__ = ["FlowRun", "FlowRunState", "PrefectAPI"]

_TIMEOUT_S = 15.0
_ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowRun:
    """A flow run and the address of its page."""

    id: str
    name: str
    url: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowRunState:
    """State of a flow run: Prefect's type and name of it, and its message."""

    type: str
    name: str
    message: str

    @property
    def ended(self) -> bool:
        """Nothing will follow."""
        return self.type in _ENDED


class PrefectAPI:
    """A server by its address, PREFECT_API_URL; PREFECT_API_KEY or PREFECT_API_AUTH_STRING open it. All calls may raise RetryableError."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._url = environ.get("PREFECT_API_URL", "").rstrip("/")
        if not self._url:
            raise ConfigError(
                "no Prefect server is named",
                hint="torchrelay up starts one here; or set PREFECT_API_URL, or train with --local",
            )
        self._headers = {"Content-Type": "application/json"}
        if environ.get("PREFECT_API_KEY"):
            self._headers["Authorization"] = f"Bearer {environ['PREFECT_API_KEY']}"
        elif environ.get("PREFECT_API_AUTH_STRING"):
            token = base64.b64encode(environ["PREFECT_API_AUTH_STRING"].encode()).decode()
            self._headers["Authorization"] = f"Basic {token}"

    def start(self, spec: TrainSpec, *, deployment: str = "train/train") -> FlowRun:
        """Ask for a flow run. Raises NotFoundError if the deployment is not there, ConfigError if the server refuses the spec."""
        try:
            found = self._call("GET", f"/deployments/name/{deployment}")
        except NotFoundError:
            raise NotFoundError(
                f"the Prefect server at {self._url} knows no deployment {deployment}",
                hint="torchrelay up serves it; `prefect deploy --all` registers it for workers",
            ) from None
        body = {"parameters": {"spec": spec_to_dict(spec)}, "state": {"type": "SCHEDULED"}}
        made = self._call("POST", f"/deployments/{found['id']}/create_flow_run", body)
        page = f"{self._url.removesuffix('/api')}/runs/flow-run/{made['id']}"
        return FlowRun(id=made["id"], name=made["name"], url=page)

    def state(self, flow_run_id: str) -> FlowRunState:
        """Return the state of a flow run."""
        state = self._call("GET", f"/flow_runs/{flow_run_id}").get("state") or {}
        return FlowRunState(
            type=str(state.get("type", "")), name=str(state.get("name", "")), message=str(state.get("message") or "")
        )

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data=data, method=method, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                return dict(json.load(reply))
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode("utf-8", "replace")
            if error.code == 404:
                raise NotFoundError(f"{path} is not known to the Prefect server") from None
            if error.code >= 500 or error.code == 429:
                raise RetryableError(f"the Prefect server answered {error.code}: {said}") from None
            raise ConfigError(f"the Prefect server refused ({error.code}): {_detail(said)}") from None
        except (OSError, ValueError) as error:
            raise RetryableError(
                f"no Prefect server answers at {self._url}: {error}",
                hint="torchrelay up starts one here; or train with --local",
            ) from None


def _detail(said: str) -> str:
    try:
        return str(json.loads(said).get("detail", said))
    except (ValueError, AttributeError):
        return said
