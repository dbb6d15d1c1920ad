"""What is done to an S3 server once, by whoever sets it up: a second key that reaches one bucket, and a look at its settings.

Never used while training: ranks and couriers hold the second key and need the six verbs only. MinIO, its forks and its front ends speak MinIO's
admin API; elsewhere a key gets its rights in the server's own configuration, and we only check that it works and what it cannot do.
"""

from __future__ import annotations

import secrets
import urllib.parse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import certifi
import urllib3
from minio import Minio, MinioAdmin
from minio.credentials.providers import StaticProvider
from minio.error import MinioAdminException, MinioException, S3Error

from torchrelay.errors import ConfigError, StoreAccessError, StoreUnavailableError
from torchrelay.store.s3_config import S3Config

__all__ = ["bucket_policy", "can_make_buckets", "grant_scoped_key", "has_minio_admin", "is_versioned", "scoped_config"]

_TIMEOUT = urllib3.Timeout(connect=5.0, read=20.0)


def scoped_config(config: S3Config, environ: Mapping[str, str]) -> S3Config:
    """Return the same bucket with the second key, from TORCHRELAY_SCOPED_ACCESS_KEY and TORCHRELAY_SCOPED_SECRET_KEY.

    Raises ConfigError when they are missing or are the first key again.
    """
    access = environ.get("TORCHRELAY_SCOPED_ACCESS_KEY", "")
    secret = environ.get("TORCHRELAY_SCOPED_SECRET_KEY", "")
    if not access or not secret:
        raise ConfigError(
            "no second key is given", hint="set TORCHRELAY_SCOPED_ACCESS_KEY and TORCHRELAY_SCOPED_SECRET_KEY"
        )
    if access == config.access_key:
        raise ConfigError("the second key is the first one again", hint="choose another TORCHRELAY_SCOPED_ACCESS_KEY")
    return replace(config, access_key=access, secret_key=secret)


def bucket_policy(bucket: str) -> dict[str, Any]:
    """Return the rights training needs and no more: list one bucket; read, write and delete its objects."""
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": ["s3:ListBucket", "s3:GetBucketLocation"],
                "Resource": [f"arn:aws:s3:::{bucket}"],
            },
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject"],
                "Resource": [f"arn:aws:s3:::{bucket}/*"],
            },
        ],
    }


def has_minio_admin(config: S3Config) -> bool:
    """Whether the server speaks MinIO's admin API. Asked by a harmless GET: elsewhere an admin call would be a write to a bucket.

    Raises StoreUnavailableError when the server does not answer.
    """
    try:
        with _pool(config) as pool:
            return pool.request("GET", f"{config.endpoint}/minio/health/live", redirect=False).status == 200
    except urllib3.exceptions.HTTPError:
        raise StoreUnavailableError(
            f"the store at {config.endpoint} did not answer", hint="is it running? torchrelay up"
        ) from None


def grant_scoped_key(config: S3Config, scoped: S3Config) -> None:
    """Create the second key, or give it back its rights, with the first. Idempotent; other keys are not touched.

    Raises StoreAccessError when the first key may not do this, StoreUnavailableError when the server does not answer.
    """
    host = urllib.parse.urlsplit(config.endpoint)
    policy = f"torchrelay-{config.bucket}"
    with _pool(config) as pool:
        admin = MinioAdmin(
            endpoint=host.netloc,
            credentials=StaticProvider(config.access_key, config.secret_key),
            region=config.region,
            secure=host.scheme == "https",
            http_client=pool,
        )
        try:
            admin.policy_add(policy, policy=bucket_policy(config.bucket))
            admin.user_add(scoped.access_key, scoped.secret_key)
            # Set, not attach: exactly this policy, also where somebody attached a wider one; and older servers know only this.
            admin.policy_set(policy, user=scoped.access_key)
        except MinioAdminException as error:
            raise StoreAccessError(
                f"the store refused to create the second key: {_reason(error)}",
                hint="TORCHRELAY_ACCESS_KEY must be the root key of the server here",
            ) from None
        except (urllib3.exceptions.HTTPError, OSError):
            raise StoreUnavailableError(f"the store at {config.endpoint} did not answer") from None


def can_make_buckets(config: S3Config) -> bool:
    """Whether this key reaches beyond its bucket: tries to make another one, and removes it if that worked.

    Raises StoreAccessError when the server does not know the key, StoreUnavailableError when it does not answer.
    """
    name = f"torchrelay-doctor-{secrets.token_hex(6)}"
    with _pool(config) as pool:
        client = _client(config, pool)
        try:
            client.make_bucket(name)
            client.remove_bucket(name)
        except S3Error as error:
            if error.code in ("InvalidAccessKeyId", "SignatureDoesNotMatch"):
                raise StoreAccessError(
                    f"the store does not know the key {config.access_key}",
                    hint="MinIO and its kin: repeat with the root key; elsewhere: add it in the server's own settings",
                ) from None
            return error.code not in ("AccessDenied", "AllAccessDisabled")
        except (MinioException, urllib3.exceptions.HTTPError, OSError):
            raise StoreUnavailableError(f"the store at {config.endpoint} did not answer") from None
    return True


def is_versioned(config: S3Config) -> bool | None:
    """Whether the bucket keeps old versions of its objects; None when the server does not say, or not to this key."""
    with _pool(config) as pool:
        try:
            return _client(config, pool).get_bucket_versioning(config.bucket).status in ("Enabled", "Suspended")
        except S3Error as error:
            # Without versioning there is no such call.
            return False if error.code == "NotImplemented" else None
        except (MinioException, urllib3.exceptions.HTTPError, OSError):
            return None


def _pool(config: S3Config) -> urllib3.PoolManager:
    return urllib3.PoolManager(
        timeout=_TIMEOUT, retries=False, cert_reqs="CERT_REQUIRED", ca_certs=config.ca_file or certifi.where()
    )


def _client(config: S3Config, pool: urllib3.PoolManager) -> Minio:
    host = urllib.parse.urlsplit(config.endpoint)
    return Minio(
        host.netloc,
        access_key=config.access_key,
        secret_key=config.secret_key,
        secure=host.scheme == "https",
        region=config.region,
        http_client=pool,
    )


def _reason(error: MinioAdminException) -> str:
    """Return the server's code alone: the full text repeats the request."""
    text = str(error)
    code = text.partition('"Code":"')[2].partition('"')[0]
    return code or text.splitlines()[0][:100]
