"""Settings of a bucket: its URL, and environment variables, since servers differ."""

import os
import re
from urllib.parse import urlsplit

from infra.storage.base import check_key
from nanochat_core.errors import StoreError

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def endpoint_setting() -> str:
    """Return the variable that sets the endpoint, or the file that must have set it."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return name
    return "endpoint_url in ~/.aws/config"


def parse_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of s3://bucket/prefix. Raises StoreError, without any secret."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise StoreError(
            "a store's URL cannot hold credentials",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        )
    if not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
        raise StoreError(
            f"unsupported store URL '{url}'",
            hint="a bucket is given like s3://bucket/prefix; its name has 3 to 63 lower-case "
            "letters, digits and inner dots and hyphens",
        )
    prefix = parts.path.strip("/")
    return parts.netloc, check_key(prefix) if prefix else ""
