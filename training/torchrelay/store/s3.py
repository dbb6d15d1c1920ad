"""Any S3 server, through the ``minio`` package's signer and urllib3. The only module that knows them.

``minio`` itself makes buckets, lists and deletes. Bytes go another way, because ``put_object`` copies them under the GIL and cannot send
``If-None-Match``: hand-signed requests (``UNSIGNED-PAYLOAD`` and a CRC32C header), bodies as views, replies read into the caller's buffer. One client
per process; using it after ``fork`` is refused, because a shared connection returns other processes' bytes.
"""

from __future__ import annotations

import base64
import datetime
import email.utils
import os
import secrets
import struct
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import certifi
import crc32c
import urllib3
from minio import Minio
from minio.credentials.providers import StaticProvider
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, S3Error, ServerError
from minio.signer import sign_v4_s3

from torchrelay.errors import (
    CorruptionError,
    NotFoundError,
    StorageFullError,
    StoreAccessError,
    StoreUnavailableError,
)
from torchrelay.store.base import Capabilities, Created, Listing, ObjectInfo, Payload, check_key, views_of
from torchrelay.store.s3_config import S3Config

__all__ = ["S3Store"]

_CONNECT_S = 5.0
_CONNECTIONS = 16
_SEND_BYTES = 4 * 2**20  # the time limit of a send is for the whole of it: this slice may take as long as a reply
_ACCESS_CODES = frozenset(
    {
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "NoSuchBucket",
        "AccountProblem",
        "AllAccessDisabled",
        "InvalidBucketName",
    }
)
_FULL_CODES = frozenset(
    {"XMinioStorageFull", "InsufficientStorage", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XAmzQuotaExceeded"}
)
_SKEW_CODES = frozenset({"RequestTimeTooSkewed", "AccessDeniedRequestExpired"})


class S3Store:
    """One bucket and prefix of an S3 server."""

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._pid = os.getpid()
        self._skew = datetime.timedelta()
        self._credentials = StaticProvider(config.access_key, config.secret_key).retrieve()
        self._pool = urllib3.PoolManager(
            num_pools=2,
            maxsize=_CONNECTIONS,
            block=False,
            retries=False,
            timeout=urllib3.Timeout(connect=_CONNECT_S, read=config.timeout_s),
            ca_certs=config.ca_file or certifi.where(),
            cert_reqs="CERT_REQUIRED",
        )
        host = urllib.parse.urlsplit(config.endpoint)
        self._minio = Minio(
            host.netloc,
            access_key=config.access_key,
            secret_key=config.secret_key,
            secure=host.scheme == "https",
            region=config.region,
            http_client=self._pool,
        )

    @property
    def url(self) -> str:
        """``s3://bucket/prefix?endpoint=...``, without credentials."""
        off = "" if self._config.checksum else "&checksum=off"
        return f"s3://{self._config.bucket}/{self._config.prefix}?endpoint={self._config.endpoint}{off}"

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def ensure_bucket(self) -> bool:
        """Create the bucket if it is missing; returns whether it was created."""
        with _Translated(self._config.bucket):
            if self._minio.bucket_exists(self._config.bucket):
                return False
            self._minio.make_bucket(self._config.bucket)
            return True

    def put(self, key: str, data: Payload) -> None:
        """PUT the views one after another, with a CRC32C of all of them for the server to check."""
        self._send(key, views_of(data), {})

    def create(self, key: str, data: bytes) -> Created:
        """PUT with ``If-None-Match: *``; a refusal is resolved by reading what is there."""
        status = self._send(key, [memoryview(data)], {"If-None-Match": "*"})
        if status != 412:
            return Created(ours=True, data=data)
        there = bytes(self.get(key))
        return Created(ours=there == data, data=there)

    def get(
        self, key: str, *, offset: int = 0, length: int | None = None, into: memoryview | None = None
    ) -> memoryview:
        """GET a range into the caller's buffer; bytes are counted."""
        wanted = length if length is not None else (len(into) if into is not None else None)
        if wanted == 0:
            return memoryview(b"")
        headers = {}
        if offset or wanted is not None:
            headers["Range"] = f"bytes={offset}-{'' if wanted is None else offset + wanted - 1}"
        response = self._request("GET", key, headers=headers)
        try:
            if response.status == 416:
                raise CorruptionError(f"{key} is shorter than {offset} bytes")
            if response.status not in (200, 206):
                self._raise(response, key)
            size = int(response.headers.get("Content-Length", "-1"))
            if response.status == 200 and (offset or (wanted is not None and size != wanted)):
                return self._from_whole(response, key, offset=offset, wanted=wanted, into=into)
            if size < 0:
                raise StoreUnavailableError(f"the store sent {key} without a length")
            if wanted is not None and size < wanted:
                raise CorruptionError(f"{key} is shorter than {offset + wanted} bytes")
            target = into[:size] if into is not None else memoryview(bytearray(size))
            _read_exactly(response, target, key)
            return target
        finally:
            self._give_back(response)

    def list(self, prefix: str, *, after: str = "", limit: int | None = None) -> Listing:
        """ListObjectsV2, page by page; the server's clock is taken from its Date header."""
        base = f"{self._config.prefix}/" if self._config.prefix else ""
        rows: list[ObjectInfo] = []
        with _Translated(f"{self._config.bucket}/{prefix}"):
            found = self._minio.list_objects(
                self._config.bucket, prefix=base + prefix, recursive=True, start_after=base + after if after else None
            )
            for item in found:
                key = str(item.object_name).removeprefix(base)
                # Some servers ignore start-after, and some list their folders as objects.
                if key <= after or key.endswith("/"):
                    continue
                modified = item.last_modified.timestamp() if item.last_modified else 0.0
                rows.append(
                    ObjectInfo(
                        key=key,
                        size_bytes=int(item.size or 0),
                        etag=str(item.etag or "").strip('"'),
                        modified_s=modified,
                    )
                )
                if limit is not None and len(rows) >= limit:
                    break
        rows.sort(key=lambda row: row.key)
        return Listing(objects=tuple(rows), server_time_s=time.time() + self._skew.total_seconds())

    def delete(self, keys: Sequence[str]) -> None:
        """Batch delete; missing keys are fine."""
        wanted = [DeleteObject(self._name(key)) for key in keys]
        with _Translated("delete"):
            failed = [
                error for error in self._minio.remove_objects(self._config.bucket, wanted) if error.code != "NoSuchKey"
            ]
        if failed:
            raise StoreUnavailableError(
                f"{len(failed)} of {len(keys)} objects were not deleted: {failed[0].code} {failed[0].name}"
            )

    def probe(self) -> Capabilities:
        """Create one key twice, and PUT a body with a wrong CRC32C."""
        key, wrong = f"probe/{secrets.token_hex(8)}", f"probe/{secrets.token_hex(8)}"
        try:
            first, second = self.create(key, b"first"), self._send(key, [memoryview(b"second")], {"If-None-Match": "*"})
            there = bytes(self.get(key))
            refused = self._refuses_wrong_checksum(wrong)
        finally:
            self.delete([key, wrong])
        return Capabilities(create=first.ours and second == 412 and there == b"first", checksum=refused)

    def _refuses_wrong_checksum(self, key: str) -> bool:
        response = self._request(
            "PUT", key, headers={"x-amz-checksum-crc32c": "AAAAAA=="}, body=[memoryview(b"not zero")]
        )
        try:
            return response.status == 400
        finally:
            self._give_back(response)

    def _name(self, key: str) -> str:
        return f"{self._config.prefix}/{check_key(key)}" if self._config.prefix else check_key(key)

    def _send(self, key: str, views: Sequence[memoryview], headers: dict[str, str]) -> int:
        """PUT a body; returns the status, which is 2xx, or 412 where a condition was sent."""
        if self._config.checksum:
            crc = 0
            for view in views:
                crc = crc32c.crc32c(view, crc)
            headers = {**headers, "x-amz-checksum-crc32c": base64.b64encode(struct.pack(">I", crc)).decode()}
        response = self._request("PUT", key, headers=headers, body=views)
        try:
            if response.status == 412 and "If-None-Match" in headers:
                return 412
            if response.status not in (200, 201, 204):
                self._raise(response, key)
            return response.status
        finally:
            self._give_back(response)

    def _request(
        self, method: str, key: str, *, headers: Mapping[str, str], body: Sequence[memoryview] | None = None
    ) -> urllib3.BaseHTTPResponse:
        if os.getpid() != self._pid:  # a fork shares connections, and then replies
            raise RuntimeError("this store was opened in another process; open a new one after fork")
        url = urllib.parse.urlsplit(
            f"{self._config.endpoint}/{self._config.bucket}/{urllib.parse.quote(self._name(key))}"
        )
        size = sum(len(view) for view in body or ())
        now = datetime.datetime.now(datetime.UTC) + self._skew
        signed = sign_v4_s3(
            method=method,
            url=url,
            region=self._config.region,
            headers={
                **headers,
                "Host": url.netloc,
                "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
                "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ"),
            },
            credentials=self._credentials,
            content_sha256="UNSIGNED-PAYLOAD",
            date=now,
        )
        if body is not None:
            signed["Content-Length"] = str(size)
            signed["Content-Type"] = "application/octet-stream"
        try:
            return self._pool.urlopen(
                method,
                url.geturl(),
                body=_slices(body) if size else None,
                headers=signed,
                preload_content=False,
                redirect=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise StoreUnavailableError(
                f"the store at {self._config.endpoint} did not answer: {_cause(error)}",
                hint="is it running? torchrelay up",
            ) from None
        except OSError as error:
            raise StoreUnavailableError(f"the store at {self._config.endpoint} broke off: {error}") from None

    def _from_whole(
        self, response: urllib3.BaseHTTPResponse, key: str, *, offset: int, wanted: int | None, into: memoryview | None
    ) -> memoryview:
        """Cut the range out of a reply that ignored it."""
        body = memoryview(response.read())
        end = len(body) if wanted is None else offset + wanted
        if end > len(body) or offset > len(body):
            raise CorruptionError(f"{key} has {len(body)} bytes, wanted {end}")
        part = body[offset:end]
        if into is None:
            return part
        into[: len(part)] = part
        return into[: len(part)]

    def _raise(self, response: urllib3.BaseHTTPResponse, key: str) -> NoReturn:
        text = response.read(65536).decode(errors="replace")
        code = _between(text, "<Code>", "</Code>") or {
            404: "NoSuchKey",
            403: "AccessDenied",
            507: "InsufficientStorage",
        }.get(response.status, "")
        if code in _SKEW_CODES or (response.status == 403 and "Skew" in text):
            self._skew = _server_time(response) - datetime.datetime.now(datetime.UTC)
            raise StoreUnavailableError(
                f"the store's clock differs from ours by {self._skew.total_seconds():.0f} s; using its clock"
            )
        retry_after = response.headers.get("Retry-After", "")
        what = f"{self._config.bucket}/{key}"
        _raise_code(code, response.status, what, retry_after_s=float(retry_after) if retry_after.isdigit() else None)

    def _give_back(self, response: urllib3.BaseHTTPResponse) -> None:
        """Return the connection to the pool if the reply was read to its end, else close it."""
        try:
            if response.status >= 300 or response.headers.get("Content-Length") == "0":
                response.drain_conn()
        except (urllib3.exceptions.HTTPError, OSError):
            response.close()
        response.release_conn()


class _Translated:
    """Turns the minio package's exceptions into ours."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, S3Error):
            status = getattr(error.response, "status", 0) or 0
            _raise_code(str(error.code), status, self._what)
        if isinstance(error, ServerError | InvalidResponseError | urllib3.exceptions.HTTPError | OSError):
            raise StoreUnavailableError(
                f"the store did not answer for {self._what!r}: {_cause(error)}", hint="is it running? torchrelay up"
            ) from None


def _raise_code(code: str, status: int, what: str, *, retry_after_s: float | None = None) -> NoReturn:
    if code in ("NoSuchKey", "NoSuchObject"):
        raise NotFoundError(f"no object {what}")
    if code in _ACCESS_CODES or status in (401, 403):
        hint = (
            "create it: torchrelay doctor --create-bucket"
            if code == "NoSuchBucket"
            else "check TORCHRELAY_ACCESS_KEY and TORCHRELAY_SECRET_KEY"
        )
        raise StoreAccessError(f"the store refused {what!r}: {code or status}", hint=hint)
    if code in _FULL_CODES or status == 507:
        raise StorageFullError(
            f"the store has no space for {what!r}: {code or status}", hint="free some space: torchrelay checkpoints RUN"
        )
    if (
        status in (408, 409, 429)
        or status >= 500
        or code in ("SlowDown", "RequestTimeout", "BadDigest", "XAmzContentChecksumMismatch")
    ):
        raise StoreUnavailableError(f"the store answered {status} {code} for {what!r}", retry_after_s=retry_after_s)
    if status == 400:
        # A body that does not match its checksum was damaged on the way; sending it again is right.
        raise StoreUnavailableError(f"the store answered 400 {code} for {what!r}")
    raise StoreAccessError(f"the store answered {status} {code} for {what!r}")


def _slices(views: Sequence[memoryview] | None) -> Iterator[memoryview]:
    for view in views or ():
        for start in range(0, len(view), _SEND_BYTES):
            yield view[start : start + _SEND_BYTES]


def _read_exactly(response: urllib3.BaseHTTPResponse, target: memoryview, key: str) -> None:
    done = 0
    try:
        while done < len(target):
            count = response.readinto(target[done : done + 2**20])
            if not count:
                raise StoreUnavailableError(f"{key} broke off after {done} of {len(target)} bytes")
            done += count
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise StoreUnavailableError(f"{key} broke off after {done} of {len(target)} bytes: {_cause(error)}") from None


def _server_time(response: urllib3.BaseHTTPResponse) -> datetime.datetime:
    try:
        return email.utils.parsedate_to_datetime(response.headers.get("Date", ""))
    except (TypeError, ValueError):
        return datetime.datetime.now(datetime.UTC)


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0] if start in text else ""


def _cause(error: BaseException) -> str:
    """Name an error without the request in it (URLs may carry signatures)."""
    reason = getattr(error, "reason", None)
    return type(reason or error).__name__
