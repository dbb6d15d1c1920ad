"""Object stores behind one seam of six verbs (see ``base``). ``open_store`` opens any of them by URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torchrelay.errors import ConfigError
from torchrelay.store.base import ObjectStore
from torchrelay.store.resilient import ResilientStore, RetryPolicy

__all__ = ["ObjectStore", "RetryPolicy", "open_store"]

_MEMORY: dict[str, ObjectStore] = {}


def open_store(
    url: str = "", *, environ: Mapping[str, str] | None = None, policy: RetryPolicy | None = None
) -> ObjectStore:
    """Open a store by URL, wrapped with retries: ``s3://bucket/prefix``, ``file:///folder`` or ``memory://name``.

    An empty URL means TORCHRELAY_STORE. Endpoint and credentials of S3 come from the environment (TORCHRELAY_S3_ENDPOINT, TORCHRELAY_ACCESS_KEY,
    TORCHRELAY_SECRET_KEY, or the AWS names); an endpoint in the URL wins. Opens no connection. Raises ConfigError with a hint.
    """
    environment = os.environ if environ is None else environ
    url = url or environment.get("TORCHRELAY_STORE", "")
    scheme, _, rest = url.partition("://")
    if scheme == "s3":
        # Only here, so that a local folder needs neither the package nor its import time.
        from torchrelay.store.s3 import S3Store
        from torchrelay.store.s3_config import S3Config

        return ResilientStore(S3Store(S3Config.parse(url, environment)), policy)
    if scheme == "file" and rest.startswith("/"):
        from torchrelay.store.files import FileStore

        return ResilientStore(FileStore(Path(rest)), policy)
    if scheme == "memory":
        from torchrelay.store.memory import MemoryStore

        return ResilientStore(_MEMORY.setdefault(rest, MemoryStore(rest)), policy)
    if not url:
        raise ConfigError(
            "no store is given",
            hint="torchrelay up starts one here; or set TORCHRELAY_STORE, or give --store s3://bucket/prefix",
        )
    raise ConfigError(
        f"cannot open store {url!r}", hint="use s3://bucket/prefix, file:///folder (absolute) or memory://name"
    )
