"""Translate the Hub client's exceptions to one line and a hint.

They come in layers: the exception names what could not be downloaded, its cause the reason.
"""

import errno
from collections.abc import Iterator
from typing import Any

from nanochat_core.errors import DataError

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})  # HTTP statuses after which to retry
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def catchable() -> tuple[type[Exception], ...]:
    """Return the types of all exceptions by which the Hub's client reports a failure.

    Most are OSErrors; ValueError and KeyError come from an answer that is not the Hub's.
    """
    from huggingface_hub.errors import (
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - the HTTP client's own
        RevisionResolutionError,
    )

    return (OSError, HTTPError, RevisionResolutionError, RuntimeError, ValueError, KeyError)


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed on a retry."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalEntryNotFoundError):  # the client has retried several times already
        return False
    for cause in _causes(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return False
        status = _status(cause)
        if status is not None:
            return status in TRANSIENT
        if _is_connection(cause) or _is_short(cause):
            return True
    return False


def is_unreachable(error: Exception) -> bool:
    """Return whether the Hub gave no answer: no network, offline mode, or a failing server."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return is_transient(error) or any(isinstance(c, OfflineModeIsEnabled) for c in _causes(error))


def seconds_to_wait(error: Exception, default: float) -> float:
    """Return the seconds of the server's Retry-After header, else `default`."""
    for cause in _causes(error):
        value = getattr(getattr(cause, "response", None), "headers", {}).get("Retry-After", "")
        # The header may also be a date, which is ignored.
        if value.isdigit():
            return float(value)
    return default


def explain(error: Exception, *, repository: str, what: str) -> DataError:
    """Return an error on why `what` of `repository` cannot be downloaded."""
    # From the outermost error inwards; of one error the most specific explanation first.
    for cause in _causes(error):
        known = _by_name(cause, repository, what) or _by_status(cause, repository, what)
        if known is None:
            known = _by_machine(cause, repository, what)
        if known is not None:
            return DataError(known[0], hint=known[1])
    return DataError(
        f"{what} of {repository} cannot be downloaded from {_endpoint()}: {_first_line(error)}",
        hint="run again: finished downloads are cached",
    )


def _by_name(cause: BaseException, repository: str, what: str) -> tuple[str, str] | None:
    """Return message and hint for an exception type of the client's, or None."""
    from huggingface_hub import constants, errors

    page = f"{_endpoint()}/datasets/{repository}"
    match cause:
        case errors.OfflineModeIsEnabled():
            return (
                f"{what} of {repository} is not on this machine, and HF_HUB_OFFLINE is set",
                f"run once without HF_HUB_OFFLINE, or copy {constants.HF_HUB_CACHE} from a machine "
                "that has it",
            )
        case errors.GatedRepoError():
            return (
                f"{repository} is gated: {what} is given only to accounts that asked for it",
                f"ask on {page}, then set HF_TOKEN to a token of that account",
            )
        case errors.RepositoryNotFoundError():
            return (
                f"there is no dataset {repository} at {_endpoint()}, or it is private",
                "check the name; for a private dataset set HF_TOKEN",
            )
        case errors.RevisionNotFoundError():
            return (
                f"{repository} has no such revision: {what} was asked for",
                f"a branch, a tag or a commit of {page}/commits/main",
            )
        case errors.RemoteEntryNotFoundError():
            return (f"{repository} has no file {what}", f"{page}/tree/main shows what it has")
        case errors.HFValidationError():
            return (
                f"'{repository}' cannot be the name of a dataset: {_first_line(cause)}",
                "a name is OWNER/NAME",
            )
        case errors.FileMetadataError():
            return (
                f"{_endpoint()} does not answer like a Hub: {_first_line(cause)}",
                "check HF_ENDPOINT and the proxy",
            )
        case _:
            return None


def _by_status(cause: BaseException, repository: str, what: str) -> tuple[str, str] | None:
    """Return message and hint for an HTTP status, or None."""
    status = _status(cause)
    match status:
        case None:
            return None
        case 401 | 403:
            return (
                f"{_endpoint()} refuses {what} of {repository} (status {status})",
                "HF_TOKEN is wrong, expired or of another account: set another one, or unset it",
            )
        case 429:
            return (
                f"{_endpoint()} limits the rate of requests: {what} of {repository} has to wait",
                "run again in some minutes: finished downloads are cached; HF_TOKEN allows more",
            )
        case _:
            return (
                f"{_endpoint()} answers {status} for {what} of {repository}",
                "run again later: finished downloads are cached",
            )


def _by_machine(cause: BaseException, repository: str, what: str) -> tuple[str, str] | None:
    """Return message and hint for an error of the disk or the network, or None."""
    from huggingface_hub import constants

    number = getattr(cause, "errno", None)
    if number in _FULL:
        return (
            f"no space left in {constants.HF_HUB_CACHE} for {what} of {repository}",
            "free some space, or set HF_HOME to a directory on another disk",
        )
    if number in _FORBIDDEN:
        return (
            f"{getattr(cause, 'filename', None) or constants.HF_HUB_CACHE} cannot be written, "
            f"where {what} of {repository} goes",
            "set HF_HOME to a directory of yours",
        )
    if _is_connection(cause):
        return (
            f"{_endpoint()} cannot be reached for {what} of {repository}: {_first_line(cause)}",
            "check the network, the proxy and HF_ENDPOINT, then run again: finished downloads are "
            "cached; or train on local text with --set shards.source=local",
        )
    if isinstance(cause, ValueError | KeyError):
        return (
            f"{_endpoint()} does not answer like a Hub: {_first_line(cause)}",
            "check HF_ENDPOINT and the proxy",
        )
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _status(cause: BaseException) -> int | None:
    response: Any = getattr(cause, "response", None)
    return getattr(response, "status_code", None)


def _is_connection(cause: BaseException) -> bool:
    """Return whether the HTTP client failed to reach the server."""
    # By name, as huggingface_hub's HTTP client is httpx or requests, depending on its version.
    names = {kind.__name__ for kind in type(cause).__mro__}
    return "TransportError" in names or isinstance(cause, ConnectionError | TimeoutError)


def _is_short(cause: BaseException) -> bool:
    """Return whether the client's own check of the size failed."""
    return isinstance(cause, OSError) and str(cause).startswith("Consistency check failed")


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
