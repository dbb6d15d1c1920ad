"""What the processes of one generation need to know, as a file in its private folder; and how they report events. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.layout import ManifestRef, parse_manifest_key

__all__ = ["GenerationRequest", "emit"]

_EVENT_BYTES = 4096  # POSIX: a write of at most PIPE_BUF bytes to a pipe is not interleaved with another


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One generation as its processes see it. ``lease_s`` is set where the courier of rank 0 keeps the lease (no launcher does).

    ``upload_mib_s`` and ``courier_cores`` cap each courier (0: no cap).
    """

    run_id: str
    generation: int
    begin_key: str | None
    store_url: str
    spec: dict[str, Any]
    stop_step: int = 0
    drain_s: float = 60.0
    lease_s: float = 0.0
    upload_mib_s: float = 0.0
    courier_cores: float = 0.0
    partial_commits: bool = False

    @property
    def begin(self) -> ManifestRef | None:
        """Checkpoint to start from; None from scratch."""
        return parse_manifest_key(self.begin_key) if self.begin_key else None

    def write(self, folder: Path) -> None:
        """Write ``request.json`` for the other processes."""
        (folder / "request.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> GenerationRequest:
        """Read ``request.json``; fields this version does not know are ignored."""
        body = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        return cls(**{name: body[name] for name in cls.__dataclass_fields__ if name in body})


def emit(event: str, **fields: Any) -> None:
    """Report one event to the launcher, if there is one. Never blocks training for long and never fails it: a full or closed pipe drops the event."""
    fd = os.environ.get("TORCHRELAY_EVENTS_FD")
    if not fd:
        return
    line = json.dumps({"event": event, **fields}).encode()[: _EVENT_BYTES - 1] + b"\n"
    try:
        os.write(int(fd), line)
    except OSError:
        # The launcher is gone or far behind; its own watch over this process deals with that.
        return
