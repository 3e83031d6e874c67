"""Settings for S3-compatible servers, from NANOCHAT_S3_... variables: servers differ in these."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from infra.storage.s3.checksums import CHECKSUMS, Checksum
from nanochat_core.errors import StoreError

_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options that differ between servers. None means the default, one for AWS, one for others."""

    addressing: str | None  # bucket in the path or in the host name
    checksum: Checksum | None  # of uploaded bodies


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the NANOCHAT_S3_... variables. Raises StoreError if a value is not allowed."""

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
        checksum=choose("NANOCHAT_S3_CHECKSUM", *CHECKSUMS),
    )


def endpoint_setting(environment: Mapping[str, str] = os.environ) -> str:
    """Return the variable that sets the endpoint, or the file that must have set it."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if environment.get(name):
            return name
    return "endpoint_url in ~/.aws/config"


def client_hint(environment: Mapping[str, str] = os.environ) -> str:
    """Return the hint for settings from which no client can be made."""
    name = endpoint_setting(environment)
    endpoint = environment.get(name, "")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        return f"{name} is '{endpoint}': it begins with http:// or https://, like http://{endpoint}"
    return "check the AWS_... variables and ~/.aws/config"
