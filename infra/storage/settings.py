"""What differs between servers that speak S3, and a person may have to say."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from nanochat_core.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What differs between servers. Where None is allowed it means: by whether this is AWS."""

    addressing: str | None  # bucket in the path or in the host name
    etag: str  # how a version stands in If-Match
    checksum: str | None  # of what is put


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The NANOCHAT_S3_... variables. Raises StoreError."""

    def choose(name: str, *choices: str) -> str | None:
        value = environment.get(name) or None
        if value is not None and value not in choices:
            raise StoreError(f"{name} is '{value}'", hint=f"it can be {' or '.join(choices)}")
        return value

    return Settings(
        addressing=choose("NANOCHAT_S3_ADDRESSING", "path", "virtual"),
        etag=choose("NANOCHAT_S3_ETAG", "quoted", "plain") or "quoted",
        checksum=choose("NANOCHAT_S3_CHECKSUM", "md5", "sha256"),
    )
