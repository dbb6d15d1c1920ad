"""Look at a store the way a run will use it, say what was found, and what to do next.

Writes only below ``probe/`` of the prefix, and removes it again. With ``--create-bucket`` it makes the bucket, with ``--scoped-user`` a key for
training that reaches nothing else; then it goes on with that key. Safe to repeat, also while runs use the store.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchrelay.errors import ConfigError, CorruptionError, RetryableError, TorchrelayError
from torchrelay.store import open_store
from torchrelay.store.base import Capabilities, ObjectStore

__all__ = ["Finding", "add_parsers", "examine"]

_LOW_SPACE_BYTES = 5 * 2**30
_MUCH_SKEW_S = 60.0
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at. ``verdict``: ok, warn (a run works, with less) or fail (a run would not)."""

    check: str
    verdict: str
    detail: str
    hint: str = ""
    exit_code: int = 0


def add_parsers(subparsers: Any) -> None:
    """Add ``torchrelay doctor``."""
    parser = subparsers.add_parser("doctor", help="check the store, and prepare it for runs", description=__doc__)
    parser.add_argument("--store", default="", metavar="URL", help="store to look at (default: TORCHRELAY_STORE)")
    parser.add_argument("--create-bucket", action="store_true", help="make the bucket if it is missing")
    parser.add_argument(
        "--scoped-user",
        action="store_true",
        help="make the key TORCHRELAY_SCOPED_ACCESS_KEY, which reaches this bucket only, and look on with it",
    )
    parser.add_argument(
        "--wait-s", type=float, default=0.0, metavar="S", help="seconds to wait for a store that is just starting"
    )
    parser.set_defaults(handler=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    findings = examine(
        args.store,
        os.environ,
        create_bucket=args.create_bucket,
        scoped_user=args.scoped_user,
        wait_s=args.wait_s,
    )
    _show(findings)
    return max((finding.exit_code for finding in findings), default=0)


def examine(
    url: str,
    environ: Mapping[str, str],
    *,
    create_bucket: bool = False,
    scoped_user: bool = False,
    wait_s: float = 0.0,
) -> list[Finding]:
    """Look at the store at ``url`` (or TORCHRELAY_STORE) and return what was found, in the order it was looked at.

    The first failure is the last finding; nothing is raised for a store that is wrong, refuses or does not answer.
    """
    examination = _Examination(
        url or environ.get("TORCHRELAY_STORE", ""),
        environ,
        create_bucket=create_bucket,
        scoped_user=scoped_user,
        wait_s=wait_s,
    )
    try:
        examination.run()
    except TorchrelayError as error:
        message = str(error).partition("\n")[0]
        failed = Finding(
            check=examination.step, verdict="fail", detail=message, hint=error.hint, exit_code=error.exit_code
        )
        return [*examination.findings, failed]
    return examination.findings


class _Examination:
    """One look at one store: what was asked, where it is, and what was found so far."""

    def __init__(
        self, url: str, environ: Mapping[str, str], *, create_bucket: bool, scoped_user: bool, wait_s: float
    ) -> None:
        self._url, self._environ = url, environ
        self._create_bucket, self._scoped_user, self._wait_s = create_bucket, scoped_user, wait_s
        self.findings: list[Finding] = []
        self.step = "settings"

    def run(self) -> None:
        """Look at one thing after another; raise at the first that a run could not live with."""
        store = open_store(self._url, environ=self._environ)
        self._found(store.url)
        if self._url.startswith("s3://"):
            store = self._s3(store)
        elif self._scoped_user:
            raise ConfigError("only an S3 store has keys", hint="leave out --scoped-user")
        self.step = "read and write"
        self._waiting(lambda: self._round_trip(store))
        self.step = "guarantees"
        self._guarantees(self._waiting(store.probe))
        if store.url.startswith("file://"):
            self.step = "space"
            self._space(Path(store.url.removeprefix("file://")))

    def _found(self, detail: str, *, verdict: str = "ok", hint: str = "", check: str = "") -> None:
        self.findings.append(Finding(check=check or self.step, verdict=verdict, detail=detail, hint=hint))

    def _s3(self, store: ObjectStore) -> ObjectStore:
        """Bucket, versioning and second key; returns the store as training will open it."""
        # Only here: a local folder needs no S3 client.
        from torchrelay.store import s3_admin
        from torchrelay.store.s3 import S3Store
        from torchrelay.store.s3_config import S3Config

        config = S3Config.parse(self._url, self._environ)
        self.step = "bucket"
        if self._create_bucket:
            made = self._waiting(S3Store(config).ensure_bucket)
            self._found(f"{config.bucket} was {'created' if made else 'there'}")
        if s3_admin.is_versioned(config):
            detail = f"{config.bucket} keeps old versions: some servers ignore the condition of a write then"
            self._found(detail, verdict="warn", hint="use an unversioned bucket")
        if not self._scoped_user:
            return store
        self.step = "training key"
        scoped = s3_admin.scoped_config(config, self._environ)
        if self._waiting(lambda: s3_admin.has_minio_admin(config)):
            self._waiting(lambda: s3_admin.grant_scoped_key(config, scoped))
            self._found(f"{scoped.access_key} may use {config.bucket}")
        else:
            self._found("this server has no MinIO admin API: its own settings must know the key")
        if s3_admin.can_make_buckets(scoped):
            hint = "give it rights in one bucket only: docs/store.md"
            self._found(f"{scoped.access_key} can make other buckets", verdict="warn", hint=hint)
        else:
            self._found(f"{scoped.access_key} cannot make other buckets")
        keys = {"TORCHRELAY_ACCESS_KEY": scoped.access_key, "TORCHRELAY_SECRET_KEY": scoped.secret_key}
        return open_store(self._url, environ={**self._environ, **keys})

    def _round_trip(self, store: ObjectStore) -> None:
        key, data = f"probe/canary-{secrets.token_hex(8)}", secrets.token_bytes(4096)
        started = time.monotonic()
        store.put(key, data)
        if bytes(store.get(key)) != data:
            raise CorruptionError("what was read back is not what was written", hint="do not train on this store")
        listing = store.list(key)
        store.delete([key])
        if [row.key for row in listing.objects] != [key] or store.list(key).objects:
            detail = "a listing does not show what was written or deleted just before"
            raise CorruptionError(detail, hint="do not train on this store")
        took_ms = 1000 * (time.monotonic() - started)
        self._found(f"write, read, list and delete work ({took_ms:.0f} ms together)")
        skew_s = listing.server_time_s - time.time()
        if abs(skew_s) > _MUCH_SKEW_S:
            hint = "set the clock of this machine"
            self._found(f"the store's clock is {skew_s:+.0f} s from ours", verdict="warn", hint=hint, check="clock")

    def _guarantees(self, can: Capabilities) -> None:
        if can.create:
            self._found("a second conditional write of a key is refused", check="one winner")
        else:
            detail = "conditional writes are ignored: nothing keeps two starts of one run apart"
            hint = "start a run in one place only, or use another server: docs/store.md"
            self._found(detail, verdict="warn", hint=hint, check="one winner")
        if can.checksum:
            self._found("a body that does not match its CRC32C is refused", check="checksums")
        else:
            detail = "wrong checksums are accepted: damage on the way is found when it is read"
            hint = "torchrelay verify RUN reads everything back"
            self._found(detail, verdict="warn", hint=hint, check="checksums")

    def _space(self, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        low = free < _LOW_SPACE_BYTES
        hint = "a checkpoint takes about three times the space of the model's parameters" if low else ""
        self._found(f"{free / 2**30:.1f} GiB free", verdict="warn" if low else "ok", hint=hint)

    def _waiting(self, call: Callable[[], _T]) -> _T:
        """Call until it works or the wait is over: a server that has just started answers before it can write."""
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                return call()
            except RetryableError:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
                time.sleep(min(0.5, left_s))


def _show(findings: list[Finding]) -> None:
    """Print a table where there is a terminal, plain lines elsewhere (the log of a container)."""
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        for finding in findings:
            hint = f" ({finding.hint})" if finding.hint else ""
            line = f"{finding.verdict:4}  {finding.check}: {finding.detail}{hint}"
            console.print(line, markup=False, highlight=False)
        return
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table("check", "verdict", "finding", box=None, pad_edge=False)
    for finding in findings:
        said = Text(finding.detail)
        if finding.hint:
            said.append(f"\n{finding.hint}", style="dim")
        table.add_row(finding.check, Text(finding.verdict, style=colours[finding.verdict]), said)
    console.print(table)
