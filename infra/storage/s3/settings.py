"""Settings of a bucket: its URL, and environment variables, since servers differ."""

import os
import re
from urllib.parse import urlsplit

from infra.storage.base import check_key
from nanochat_core.errors import StoreError

_ADDRESSING = ("path", "virtual")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def read_addressing() -> str | None:
    """Return NANOCHAT_S3_ADDRESSING: where a URL has the bucket's name. None means botocore's way.

    That is the path, and the host name at AWS itself. Raises StoreError for any other value.
    """
    value = os.environ.get("NANOCHAT_S3_ADDRESSING") or None
    if value not in (None, *_ADDRESSING):
        raise StoreError(
            f"NANOCHAT_S3_ADDRESSING is '{value}'", hint=f"it can be {' or '.join(_ADDRESSING)}"
        )
    return value


def endpoint_setting() -> str:
    """Return the variable that sets the endpoint, or the file that must have set it."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return name
    return "endpoint_url in ~/.aws/config"


def client_hint() -> str:
    """Return the hint for settings from which no client can be made."""
    name = endpoint_setting()
    endpoint = os.environ.get(name, "")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        return f"{name} is '{endpoint}': it begins with http:// or https://, like http://{endpoint}"
    return "check the AWS_... variables and ~/.aws/config"


def parse_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of s3://bucket/prefix. Raises StoreError, without any secret."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise StoreError(
            "a store's URL cannot hold credentials",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        )
    name, prefix = parts.netloc, parts.path.strip("/")
    if parts.scheme != "s3" or not name or parts.query or parts.fragment:
        raise StoreError(
            f"unsupported store URL '{url}'", hint="a bucket is given like s3://bucket/prefix"
        )
    if not _BUCKET.fullmatch(name):
        raise StoreError(
            f"unsupported store URL '{url}': no bucket can be called '{name}'",
            hint="its name has 3 to 63 lower-case letters, digits and inner dots and hyphens",
        )
    return name, check_key(prefix) if prefix else ""
