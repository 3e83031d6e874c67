"""What differs between servers that speak S3, and a person may have to say."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from infra.storage.s3.checksums import CHECKSUMS, Checksum
from nanochat_core.errors import StoreError

_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What differs between servers. Where None is allowed it means: by whether this is AWS."""

    addressing: str | None  # bucket in the path or in the host name
    etag: str  # how a version stands in If-Match
    checksum: Checksum | None  # of what is put


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The NANOCHAT_S3_... variables. Raises StoreError."""

    def choose(name: str, *choices: _Choice) -> _Choice | None:
        value = environment.get(name) or None
        for choice in choices:
            if value == choice:
                return choice
        if value is not None:
            raise StoreError(f"{name} is '{value}'", hint=f"it can be {' or '.join(choices)}")
        return None

    return Settings(
        addressing=choose("NANOCHAT_S3_ADDRESSING", "path", "virtual"),
        etag=choose("NANOCHAT_S3_ETAG", "quoted", "plain") or "quoted",
        checksum=choose("NANOCHAT_S3_CHECKSUM", *CHECKSUMS),
    )


def endpoint_setting(environment: Mapping[str, str] = os.environ) -> str:
    """Where a person has said which server is meant: the variable that counts, or a file."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if environment.get(name):
            return name
    return "endpoint_url in ~/.aws/config"


def client_hint(environment: Mapping[str, str] = os.environ) -> str:
    """What to check when the settings make no client."""
    name = endpoint_setting(environment)
    endpoint = environment.get(name, "")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        return f"{name} is '{endpoint}': it begins with http:// or https://, like http://{endpoint}"
    return "check the AWS_... variables and ~/.aws/config"
