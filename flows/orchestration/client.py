"""Prefect's client for whoever must not wait: it soon says that nobody answers, or what is refused.

A run's own client asks again for eight minutes, so that the run's end is told whatever happens
meanwhile. Who follows an order looks again soon anyway, and has a store to ask in between.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from infra.prefect.access import AUTH
from nanochat_core.errors import ConfigError

SECONDS = 10.0  # for an answer
NOT_ANSWERING = (httpx.HTTPError, PrefectException, OSError)
_PASSING = (408, 425, 429)  # of the answers that are the asker's fault, these are not
_SAID = 500  # characters of what the server says


@contextlib.contextmanager
def quick_client() -> Generator[SyncPrefectClient]:
    """A client that asks once, and is nobody else's: the context's was made with more patience.

    Inside, Prefect's own functions ask once too. Raises ConfigError when the server refuses, what
    Prefect's client raises when it does not answer.
    """
    settings: dict[Any, Any] = {PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: SECONDS}
    with (
        telling_refusals(),
        temporary_settings(settings),
        get_client(sync_client=True, httpx_settings={"timeout": SECONDS}) as client,
    ):
        yield client


@contextlib.contextmanager
def telling_refusals() -> Generator[None]:
    """What the server refuses is a person's to mend: it would refuse it again. As ConfigError."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if not 400 <= status < 500 or status in _PASSING:
            raise
        hint = (
            f"set {AUTH} as it is set for the server"
            if status in (401, 403)
            else "`nanochat deploy` tells Prefect what this code's deployments take"
        )
        raise ConfigError(f"Prefect refuses ({status}): {_said(error)}", hint=hint) from error


def _said(error: httpx.HTTPStatusError) -> str:
    """The server's own words, in one line."""
    text = error.response.text
    with contextlib.suppress(ValueError, TypeError, KeyError):
        tree = error.response.json()
        text = str(tree.get("detail") or tree.get("exception_detail") or text)
    return " ".join(text.split())[:_SAID] or error.response.reason_phrase
