"""Turn the exceptions of the Hub's client into one line and a hint.

They come in layers: the exception names what could not be downloaded, its cause the reason.
"""

import contextlib
import errno
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Literal, TypeAlias, TypeVar

from nanochat_core.errors import DataError, first_line

WAITS = (1.0, 4.0, 15.0)  # seconds before a retry of what the client does not retry itself
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})  # HTTP statuses after which to retry
PROXY = "HTTPS_PROXY, HTTP_PROXY, ALL_PROXY (http, https, socks5 or socks5h), SSL_CERT_FILE"
_NO_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})

_Result = TypeVar("_Result")
Kind: TypeAlias = Literal["dataset", "model"]  # of a repository, the Hub's words


class Unreachable(DataError):
    """The server gave no answer: no network, offline mode, or a server that fails."""


def with_retries(action: Callable[[], _Result]) -> _Result:
    """Return `action()`; after Unreachable it is called again, after each of WAITS. Not offline."""
    from huggingface_hub import constants

    for wait in () if constants.HF_HUB_OFFLINE else WAITS:
        try:
            return action()
        except Unreachable:
            time.sleep(wait)
    return action()


@contextlib.contextmanager
def explaining(repository: str, what: str, *, kind: Kind = "dataset") -> Generator[None]:
    """Raise DataError that says why `what` of `repository` cannot be downloaded."""
    from huggingface_hub import errors

    http: Any = errors  # the exceptions of the HTTP client, which the package does not export
    kinds = (http.HTTPError, errors.RevisionResolutionError, RuntimeError, ValueError, KeyError)
    try:
        yield
    # Most are OSErrors. ValueError and KeyError come from an answer that is not the Hub's,
    # ImportError from a proxy of a kind for which the client needs another package.
    except (OSError, ImportError, *kinds, errors.CachedRepoTreeNotFoundError) as error:
        raise _explain(error, repository, what, kind) from error
    except Exception as error:
        if type(error).__name__ != "InvalidURL":  # of a proxy; it has no public base
            raise
        raise _explain(error, repository, what, kind) from error


def _explain(error: Exception, repository: str, what: str, kind: Kind) -> DataError:
    from huggingface_hub import constants, errors

    causes = list(_causes(error))
    endpoint = constants.ENDPOINT
    page = f"{endpoint}/{'datasets/' if kind == 'dataset' else ''}{repository}"
    # With the first the client says that it has retried for half a minute already.
    is_final = any(isinstance(cause, errors.LocalEntryNotFoundError) for cause in causes)
    unreachable = DataError if is_final else Unreachable

    def find(*kinds: type[BaseException]) -> BaseException | None:
        return next((cause for cause in causes if isinstance(cause, kinds)), None)

    if find(errors.OfflineModeIsEnabled):
        return unreachable(
            f"{what} of {repository} is not on this machine, and HF_HUB_OFFLINE is set",
            hint=f"run once without HF_HUB_OFFLINE, or copy {constants.HF_HUB_CACHE} from a "
            "machine that has it",
        )
    if find(errors.GatedRepoError):
        return DataError(
            f"{repository} is gated: {what} is given only to accounts that asked for it",
            hint=f"ask on {page}, then set HF_TOKEN to a token of that account",
        )
    if find(errors.RepositoryNotFoundError, errors.HFValidationError):
        return DataError(
            f"there is no {kind} {repository} at {endpoint}, or it is private",
            hint=f"a name is OWNER/NAME; for a private {kind} set HF_TOKEN",
        )
    if find(errors.RevisionNotFoundError):
        return DataError(
            f"{repository} has no such revision: {what} was asked for",
            hint=f"a branch, a tag or a commit of {page}/commits/main",
        )
    if status := next(filter(None, map(_status, causes)), None):
        return (unreachable if status in TRANSIENT else DataError)(
            f"{endpoint} answers {status} for {what} of {repository}",
            hint="HF_TOKEN is wrong, expired or of another account: set another one, or unset it"
            if status in (401, 403)
            else "run again later: finished downloads are cached",
        )
    if no_write := next((c for c in causes if getattr(c, "errno", None) in _NO_WRITE), None):
        return DataError(
            f"{what} of {repository} cannot be written to {constants.HF_HUB_CACHE}: {no_write}",
            hint="set HF_HOME to a directory of yours on a disk with space",
        )
    lost = next(filter(_is_connection, causes), None)
    return (unreachable if lost else DataError)(
        f"{what} of {repository} cannot be downloaded from {endpoint}: "
        f"{first_line(lost or causes[-1])}",
        hint=f"check the network, HF_ENDPOINT and {PROXY}; finished downloads are cached"
        + ("; or train on local text with --set shards.source=local" if kind == "dataset" else ""),
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _status(cause: BaseException) -> int | None:
    return getattr(getattr(cause, "response", None), "status_code", None)


def _is_connection(cause: BaseException) -> bool:
    # By name: huggingface_hub's HTTP client is httpx or httpx2, depending on its version.
    names = {kind.__name__ for kind in type(cause).__mro__}
    return "TransportError" in names or isinstance(cause, ConnectionError | TimeoutError)
