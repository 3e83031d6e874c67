"""Translate the Hub client's exceptions to one line and a hint.

They come in layers: the exception names what could not be downloaded, its cause the reason.
"""

import errno
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nanochat_core.errors import DataError

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})  # HTTP statuses after which to retry
MAX_WAIT = 60.0  # seconds, even if a Retry-After is longer: a job that is silent for long is ended
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
PROXY = "HTTPS_PROXY, HTTP_PROXY, ALL_PROXY (http, https, socks5 or socks5h), SSL_CERT_FILE"
_NO_HUB = ("{endpoint} does not answer like a Hub: {line}", "check HF_ENDPOINT and the proxy")


def catchable() -> tuple[type[Exception], ...]:
    """Return the types of all exceptions by which the Hub's client reports a failure.

    Most are OSErrors; ValueError and KeyError come from an answer that is not the Hub's,
    ImportError from a proxy of a kind for which the client needs another package, the last from
    one whose address is none.
    """
    from huggingface_hub.errors import (
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - the HTTP client's own
        RevisionResolutionError,
    )

    answers = (HTTPError, RevisionResolutionError, RuntimeError, ValueError, KeyError)
    return (OSError, ImportError, *answers, _invalid_url())


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


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait by the Retry-After header, at most MAX_WAIT; None if unknown."""
    value = headers.get("Retry-After", "")
    # It may also be a date, which is ignored.
    return min(float(value), MAX_WAIT) if value.isdecimal() else None


def seconds_to_wait(error: Exception, default: float) -> float:
    """Return the seconds of the server's Retry-After header, else `default`."""
    for cause in _causes(error):
        asked = retry_after(getattr(getattr(cause, "response", None), "headers", {}))
        if asked is not None:
            return asked
    return default


def explain(error: Exception, *, repository: str, what: str) -> DataError:
    """Return an error on why `what` of `repository` cannot be downloaded."""
    from huggingface_hub import constants

    # From the outermost error inwards; of one error the most specific explanation first.
    for cause in _causes(error):
        for applies, message, hint in _explanations():
            if applies(cause):
                facts = {
                    "endpoint": constants.ENDPOINT,
                    "repository": repository,
                    "what": what,
                    "page": f"{constants.ENDPOINT}/datasets/{repository}",
                    "cache": constants.HF_HUB_CACHE,
                    "file": getattr(cause, "filename", None) or constants.HF_HUB_CACHE,
                    "status": _status(cause),
                    "line": _first_line(cause),
                }
                return DataError(message.format(**facts), hint=hint.format(**facts))
    return DataError(
        f"{what} of {repository} cannot be downloaded from {constants.ENDPOINT}: "
        f"{_first_line(error)}",
        hint="run again: finished downloads are cached",
    )


def _explanations() -> Sequence[tuple[Callable[[BaseException], object], str, str]]:
    """Return which causes have which message and hint, the most specific first."""
    from huggingface_hub import errors

    def of_type(*kinds: type[BaseException]) -> Callable[[BaseException], bool]:
        return lambda cause: isinstance(cause, kinds)

    return (
        (
            of_type(errors.OfflineModeIsEnabled),
            "{what} of {repository} is not on this machine, and HF_HUB_OFFLINE is set",
            "run once without HF_HUB_OFFLINE, or copy {cache} from a machine that has it",
        ),
        (
            of_type(errors.GatedRepoError),
            "{repository} is gated: {what} is given only to accounts that asked for it",
            "ask on {page}, then set HF_TOKEN to a token of that account",
        ),
        (
            of_type(errors.RepositoryNotFoundError),
            "there is no dataset {repository} at {endpoint}, or it is private",
            "check the name; for a private dataset set HF_TOKEN",
        ),
        (
            of_type(errors.RevisionNotFoundError),
            "{repository} has no such revision: {what} was asked for",
            "a branch, a tag or a commit of {page}/commits/main",
        ),
        (
            of_type(errors.RemoteEntryNotFoundError),
            "{repository} has no file {what}",
            "{page}/tree/main shows what it has",
        ),
        (
            of_type(errors.HFValidationError),
            "'{repository}' cannot be the name of a dataset: {line}",
            "a name is OWNER/NAME",
        ),
        (of_type(errors.FileMetadataError), *_NO_HUB),
        (
            lambda cause: _status(cause) in (401, 403),
            "{endpoint} refuses {what} of {repository} (status {status})",
            "HF_TOKEN is wrong, expired or of another account: set another one, or unset it",
        ),
        (
            lambda cause: _status(cause) == 429,
            "{endpoint} limits the rate of requests: {what} of {repository} has to wait",
            "run again in some minutes: finished downloads are cached; HF_TOKEN allows more",
        ),
        (
            _status,
            "{endpoint} answers {status} for {what} of {repository}",
            "run again later: finished downloads are cached",
        ),
        (
            lambda cause: getattr(cause, "errno", None) in _FULL,
            "no space left in {cache} for {what} of {repository}",
            "free some space, or set HF_HOME to a directory on another disk",
        ),
        (
            lambda cause: getattr(cause, "errno", None) in _FORBIDDEN,
            "{file} cannot be written, where {what} of {repository} goes",
            "set HF_HOME to a directory of yours",
        ),
        (
            _is_connection,
            "{endpoint} cannot be reached for {what} of {repository}: {line}",
            "check the network, the proxy and HF_ENDPOINT, then run again: finished downloads are "
            "cached; or train on local text with --set shards.source=local",
        ),
        (
            _is_of_proxy,
            "no request can be sent to {endpoint} for {what} of {repository}: {line}",
            f"check {PROXY}",
        ),
        (of_type(ValueError, KeyError), *_NO_HUB),
    )


def _is_of_proxy(cause: BaseException) -> bool:
    """Return whether the HTTP client could not be made: a proxy's address or kind is wrong."""
    is_scheme = isinstance(cause, ValueError) and "scheme for proxy" in str(cause)
    return is_scheme or isinstance(cause, ImportError | _invalid_url())


def _invalid_url() -> type[Exception]:
    """Return the type of the HTTP client's error on an address, which is not an HTTPError."""
    from huggingface_hub.errors import (
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - the HTTP client's own
    )

    # The client is httpx or httpx2, depending on the version of huggingface_hub.
    return sys.modules[HTTPError.__module__].InvalidURL


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


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
