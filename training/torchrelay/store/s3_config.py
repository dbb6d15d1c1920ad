"""Where an S3 server is and with which keys it is used: read from a URL and the environment."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from torchrelay.errors import ConfigError, StoreAccessError

__all__ = ["S3Config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Config:
    """Where the server is, and who we are. ``repr`` never shows the keys.

    ``timeout_s`` bounds each wait for bytes, not a whole transfer.
    ``checksum`` sends a CRC32C with each PUT: it costs about 0.07 CPU seconds per GiB, and lets servers that know it refuse a damaged body.
    """

    endpoint: str
    bucket: str
    prefix: str
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: str = ""
    ca_file: str = ""
    checksum: bool = True
    timeout_s: float = 20.0

    def __repr__(self) -> str:
        return f"S3Config(endpoint={self.endpoint!r}, bucket={self.bucket!r}, prefix={self.prefix!r})"

    @classmethod
    def parse(cls, url: str, environ: Mapping[str, str]) -> S3Config:
        """Read ``s3://bucket/prefix[?endpoint=...&checksum=off]`` and the environment; the URL wins. Raises ConfigError with a hint."""
        parts = urllib.parse.urlsplit(url)
        if "@" in parts.netloc:
            raise ConfigError(
                "a store URL must not contain credentials", hint="set TORCHRELAY_ACCESS_KEY and TORCHRELAY_SECRET_KEY"
            )
        query = dict(urllib.parse.parse_qsl(parts.query))
        endpoint = query.get("endpoint") or environ.get("TORCHRELAY_S3_ENDPOINT") or "https://s3.amazonaws.com"
        if not endpoint.startswith(("http://", "https://")) or not parts.netloc:
            raise ConfigError(
                f"cannot use store {url!r} at endpoint {endpoint!r}",
                hint="s3://bucket/prefix, endpoint http(s)://host:port",
            )
        access = environ.get("TORCHRELAY_ACCESS_KEY") or environ.get("AWS_ACCESS_KEY_ID") or ""
        secret = environ.get("TORCHRELAY_SECRET_KEY") or environ.get("AWS_SECRET_ACCESS_KEY") or ""
        if not access or not secret:
            raise StoreAccessError(
                "no credentials for the store",
                hint="set TORCHRELAY_ACCESS_KEY and TORCHRELAY_SECRET_KEY, or run: torchrelay up",
            )
        timeout = environ.get("TORCHRELAY_S3_TIMEOUT_S", "20")
        try:
            timeout_s = float(timeout)
        except ValueError:
            raise ConfigError(f"TORCHRELAY_S3_TIMEOUT_S is {timeout!r}, not a number of seconds") from None
        return cls(
            endpoint=endpoint.rstrip("/"),
            bucket=parts.netloc,
            prefix=parts.path.strip("/"),
            region=environ.get("TORCHRELAY_S3_REGION", "us-east-1"),
            access_key=access,
            secret_key=secret,
            ca_file=environ.get("TORCHRELAY_S3_CA_FILE", ""),
            checksum=query.get("checksum", "on") != "off",
            timeout_s=timeout_s,
        )
