"""Check that our pools and deployments are registered at a shared Prefect server."""

import urllib.error
from collections.abc import Sequence
from http import HTTPStatus
from urllib.parse import quote

from infra.prefect.access import ask

_FLOW = "/deployments/name/nanochat/nanochat"  # registered together with all the others
_ANSWER_SECONDS = 20.0  # a busy server reads its database for longer than a health check takes


def unknown_to(api_url: str, pools: Sequence[str]) -> list[str]:
    """Return, in words, which of these pools and of our deployments the server does not know.

    Empty if it does not answer: the caller reports that instead.
    """
    try:
        missing = [f"the pool {name}" for name in pools if not _knows(api_url, _path(name))]
        return missing if _knows(api_url, _FLOW) else [*missing, "our deployments"]
    except (OSError, ValueError):
        return []


def _path(pool: str) -> str:
    return f"/work_pools/{quote(pool, safe='')}"


def _knows(api_url: str, path: str) -> bool:
    try:
        ask(api_url, path, seconds=_ANSWER_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.NOT_FOUND:
            return False
        raise
    return True
