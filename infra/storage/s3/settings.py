"""Settings for S3-compatible servers, from environment variables: servers differ in these."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from nanochat_core.errors import StoreError

_ADDRESSING = ("path", "virtual")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options that differ between servers. None means the default, one for AWS, one for others."""

    addressing: str | None  # bucket in the path or in the host name


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read NANOCHAT_S3_ADDRESSING. Raises StoreError if its value is not allowed."""
    value = environment.get("NANOCHAT_S3_ADDRESSING") or None
    if value not in (None, *_ADDRESSING):
        raise StoreError(
            f"NANOCHAT_S3_ADDRESSING is '{value}'", hint=f"it can be {' or '.join(_ADDRESSING)}"
        )
    return Settings(addressing=value)


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
