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
from infra.prefect.access import find_refusal

NOT_ANSWERING = (httpx.HTTPError, PrefectException, OSError)


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
        if (refusal := find_refusal(error)) is None:
            raise
        raise refusal from error
