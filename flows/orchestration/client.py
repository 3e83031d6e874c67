"""Prefect's client for callers that must not block: one try, a short timeout, clear refusals.

Prefect's own client of a run retries for minutes, so that the end of the run is reported through an
outage. Code that polls tries again soon anyway, and can ask the store in between.
"""

import contextlib
from collections.abc import Generator

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import SettingsContext, get_settings_context
from prefect.exceptions import PrefectException

from infra.polling import ANSWER_SECONDS
from infra.prefect.access import AUTH
from nanochat_core.errors import ConfigError

NOT_ANSWERING = (httpx.HTTPError, PrefectException, OSError)
# Request timeout, too early, too many requests: status codes 4xx that a later try may not get.
_PASSING = (408, 425, 429)
_SAID = 500  # characters of the server's message that an error shows


@contextlib.contextmanager
def quick_client() -> Generator[SyncPrefectClient]:
    """Yield a client of its own that sends each request once, with a timeout of ANSWER_SECONDS.

    Inside, Prefect's own functions send requests once too. Raises ConfigError if the server refuses
    a request, and one of NOT_ANSWERING if it does not respond.
    """
    # Not the client of Prefect's context: that one was made with the settings that retry.
    context = get_settings_context()
    # Prefect's `temporary_settings` would read the environment and its files again: 74 ms.
    changed = {
        "api": context.settings.api.model_copy(update={"request_timeout": ANSWER_SECONDS}),
        "client": context.settings.client.model_copy(update={"max_retries": 0}),
    }
    settings = context.settings.model_copy(update=changed)
    with (
        reporting_refusals(),
        SettingsContext(profile=context.profile, settings=settings),
        get_client(sync_client=True, httpx_settings={"timeout": ANSWER_SECONDS}) as client,
    ):
        yield client


@contextlib.contextmanager
def reporting_refusals() -> Generator[None]:
    """Turn a refusal of the server, which a retry would only repeat, into a ConfigError."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if not 400 <= status < 500 or status in _PASSING:
            raise
        hint = (
            f"set {AUTH} as it is set for the server"
            if status in (401, 403)
            else "if its deployments are missing or of another version: `nanochat up --register`"
        )
        raise ConfigError(f"Prefect refuses ({status}): {_said(error)}", hint=hint) from error


def _said(error: httpx.HTTPStatusError) -> str:
    """Return the server's message in one line, at most _SAID characters."""
    text = error.response.text
    with contextlib.suppress(ValueError, TypeError, KeyError):
        tree = error.response.json()
        text = str(tree.get("detail") or tree.get("exception_detail") or text)
    return " ".join(text.split())[:_SAID] or error.response.reason_phrase
