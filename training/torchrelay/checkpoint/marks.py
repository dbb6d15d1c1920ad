"""Marks beside checkpoints: verified, pinned, forgotten. (Damage has its own in ``reader``: loads depend on it.)

Each is one small sealed object under the checkpoint's name, so marking races with nothing and needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torchrelay.checkpoint.layout import (
    ManifestRef,
    forgotten_key,
    forgotten_prefix,
    parse_mark_key,
    pin_key,
    pins_prefix,
    verified_key,
    verified_prefix,
)
from torchrelay.checkpoint.manifest import Manifest
from torchrelay.checkpoint.sealed import seal, unseal
from torchrelay.errors import CorruptionError, NotFoundError
from torchrelay.store.base import ObjectStore

__all__ = [
    "clear_verified",
    "list_forgotten",
    "list_pins",
    "list_verified",
    "mark_verified",
    "pin",
    "read_forgotten",
    "unpin",
    "write_forgotten",
]


def mark_verified(store: ObjectStore, run_id: str, ref: ManifestRef, *, size_bytes: int) -> None:
    """Note that every byte of a checkpoint (``size_bytes`` of packs) was read back and is right."""
    store.put(verified_key(run_id, ref), seal("verified", {"found_s": time.time(), "bytes": size_bytes}))


def clear_verified(store: ObjectStore, run_id: str, ref: ManifestRef) -> None:
    """Take the mark away: the checkpoint was found damaged since."""
    store.delete([verified_key(run_id, ref)])


def list_verified(store: ObjectStore, run_id: str) -> frozenset[ManifestRef]:
    """Return the checkpoints that are marked as verified."""
    return _marked(store, verified_prefix(run_id))


def pin(store: ObjectStore, run_id: str, ref: ManifestRef, *, why: str) -> None:
    """Keep a checkpoint whatever the retention policy says, until ``unpin``."""
    store.put(pin_key(run_id, ref), seal("pin", {"why": why, "since_s": time.time()}))


def unpin(store: ObjectStore, run_id: str, ref: ManifestRef) -> None:
    """Leave a checkpoint to the retention policy again."""
    store.delete([pin_key(run_id, ref)])


def list_pins(store: ObjectStore, run_id: str) -> frozenset[ManifestRef]:
    """Return the pinned checkpoints."""
    return _marked(store, pins_prefix(run_id))


def write_forgotten(store: ObjectStore, run_id: str, ref: ManifestRef, manifest: Manifest | None, *, why: str) -> None:
    """Leave the losses of a checkpoint that is about to be forgotten: the curve of the run stays whole. None: it could not be read."""
    trace, size = (manifest.trace, manifest.size_bytes) if manifest else ((), 0)
    body = {"why": why, "forgotten_s": time.time(), "trace": trace, "bytes": size}
    store.put(forgotten_key(run_id, ref), seal("forgotten", body))


def list_forgotten(store: ObjectStore, run_id: str) -> frozenset[ManifestRef]:
    """Return the checkpoints that were forgotten, or were about to be when somebody died (their manifests are then still there)."""
    return _marked(store, forgotten_prefix(run_id))


def read_forgotten(store: ObjectStore, run_id: str, ref: ManifestRef) -> Mapping[str, Any] | None:
    """Return what is left of a forgotten checkpoint: ``why``, ``forgotten_s``, ``trace``, ``bytes``; None if it cannot be read."""
    key = forgotten_key(run_id, ref)
    try:
        body = unseal("forgotten", store.get(key), where=key)
        return {**body, "trace": tuple((int(step), loss) for step, loss in body["trace"])}
    except (CorruptionError, NotFoundError, KeyError, TypeError, ValueError):
        return None


def _marked(store: ObjectStore, prefix: str) -> frozenset[ManifestRef]:
    marks = (parse_mark_key(item.key) for item in store.list(prefix).objects)
    return frozenset(mark[1] for mark in marks if mark)
