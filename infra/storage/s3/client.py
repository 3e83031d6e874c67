"""Clients of servers that speak S3: the only file that uses boto3 and botocore.

They read profiles, SSO and roles from the files and variables of AWS. Their retries are off:
`S3Store` repeats whole operations instead. Every failure is raised as ErrorResponse or NoResponse.
"""

import contextlib
import copy
import functools
import http.client
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import boto3  # pyright: ignore[reportMissingTypeStubs]
import botocore.session  # pyright: ignore[reportMissingTypeStubs]
import urllib3.exceptions
from botocore import exceptions as boto  # pyright: ignore[reportMissingTypeStubs]
from botocore import handlers as boto_handlers  # pyright: ignore[reportMissingTypeStubs]
from botocore.config import Config  # pyright: ignore[reportMissingTypeStubs]
from botocore.hooks import HierarchicalEmitter  # pyright: ignore[reportMissingTypeStubs]
from botocore.loaders import Loader  # pyright: ignore[reportMissingTypeStubs]
from botocore.parsers import ResponseParserError  # pyright: ignore[reportMissingTypeStubs]
from botocore.utils import (  # pyright: ignore[reportMissingTypeStubs]
    conditionally_calculate_md5,  # pyright: ignore[reportUnknownVariableType]
)
from s3transfer.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
    RetriesExceededError,
    S3DownloadFailedError,
    S3ValidationError,
)

from infra.storage.s3.errors import NOT_S3, Changed, ErrorResponse, NoResponse, describe_loss
from infra.storage.s3.gateways import check_response
from infra.storage.s3.settings import Settings

CONNECT_SECONDS = 5
READ_SECONDS = 60  # longest pause between two pieces of an answer
THREADS = 8  # requests of transfers at once, for all transfers of one store together
MAX_ANSWER = 8 << 20  # bytes of an answer that is no object; 1000 keys have 2 MB

# No answer, or one cut short: whether the store carried the request out is not known.
LOST = (
    *(boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError),
    *(boto.FlexibleChecksumError, ResponseParserError, urllib3.exceptions.HTTPError),
    *(http.client.HTTPException, ConnectionError, TimeoutError),
    *(RetriesExceededError, S3ValidationError),
)
NO_CLIENT = (boto.BotoCoreError, ValueError)  # raised when the settings are not valid
_NO_CREDENTIALS = (
    *(boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError),
    *(boto.NoAuthTokenError, boto.TokenRetrievalError, boto.SSOError),
)


def make_client(settings: Settings, *, seconds: float) -> tuple[Any, bool]:
    """Return a client from AWS's usual variables and files, and whether it speaks to AWS itself."""
    # Only a client knows the endpoint that variables, profile and region lead to.
    client = _make_client(settings, seconds=seconds, is_aws=False)
    host = re.sub(r"^https?://|[:/].*$", "", client.meta.endpoint_url)
    if not host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")):
        return client, False
    client.close()
    return _make_client(settings, seconds=seconds, is_aws=True), True


def _make_client(settings: Settings, *, seconds: float, is_aws: bool) -> Any:
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=seconds,
        # A retry inside botocore would hide a lost answer: only a whole operation can find out
        # whether its own write took effect.
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=4 * THREADS,
        # Few other servers have a host name for each bucket, so they get it in the path.
        s3={"addressing_style": settings.addressing or ("auto" if is_aws else "path")},
        # Servers differ in the checksums they know; every one of them knows Content-MD5.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
    )
    session: Any = botocore.session.Session(
        event_hooks=copy.copy(_handlers()), include_builtin_handlers=False
    )
    session.register_component("data_loader", _descriptions())
    client = cast(Any, boto3).Session(botocore_session=session).client("s3", config=config)
    builtin: Any = vars(boto_handlers)["BUILTIN_HANDLERS"]
    for event, handler, *_ in builtin:
        # Botocore's own handler reports what is not XML as a temporary error, to be retried.
        if event == "before-parse.s3.*":
            client.meta.events.unregister(event, handler)
    client.meta.events.register("before-parse.s3.*", check_response)
    for verb in ("PutObject", "UploadPart"):
        client.meta.events.register(f"before-call.s3.{verb}", _add_md5)
    send = client._endpoint.http_session.send
    client.meta.events.register("before-send.s3.*", functools.partial(_send, send))
    return client


def _add_md5(params: Any, **_: object) -> None:
    """Handle botocore's event `before-call`: give the body a checksum, unless it has one."""
    if "Content-MD5" not in params["headers"]:
        conditionally_calculate_md5(params)


def _send(send: Callable[[Any], Any], request: Any, **_: object) -> Any:
    """Handle botocore's event `before-send`: send, and read what is no object up to a limit."""
    # Without streaming `send` reads the whole answer: one of many gigabytes would fill the memory.
    is_object, request.stream_output = request.stream_output, True
    response = send(request)
    if not is_object or response.status_code >= 300:
        response._content = b"".join(_pieces(response.raw))
    return response


def _pieces(raw: Any) -> Iterator[bytes]:
    size = 0
    for piece in raw.stream():
        size += len(piece)
        if size > MAX_ANSWER:
            raw.close()
            said = f"more than {MAX_ANSWER >> 20} MiB where no object was asked for"
            raise ErrorResponse(NOT_S3, status=raw.status, message=said)
        yield piece


class _Descriptions(Loader):
    """Botocore's description of S3 alone: a fifth of the time of looking for all 400 services."""

    def list_available_services(self, type_name: str) -> list[str]:
        """Return the only service that is ever asked for."""
        return ["s3"]


@functools.cache
def _descriptions() -> Any:
    """Return botocore's description of S3, read once: most of the time of making a client."""
    return _Descriptions()


@functools.cache
def _handlers() -> Any:
    """Return botocore's own handlers: to register them again for a client costs 9 ms."""
    emitter = HierarchicalEmitter()
    botocore.session.Session(event_hooks=emitter)
    return emitter


@contextlib.contextmanager
def translating() -> Generator[None]:
    """Turn botocore's exceptions into ErrorResponse and NoResponse."""
    try:
        yield
    except S3DownloadFailedError as error:
        raise Changed from error
    except boto.ClientError as error:
        answer: Any = error.response
        meta = answer.get("ResponseMetadata", {})
        said = answer.get("Error", {})
        raise ErrorResponse(
            said.get("Code") or str(meta.get("HTTPStatusCode")),
            status=meta.get("HTTPStatusCode", 0),
            message=said.get("Message", ""),
            headers=meta.get("HTTPHeaders", {}),
        ) from error
    except LOST as error:
        cause: Any = getattr(error, "kwargs", {}).get("error", error)
        raise NoResponse(describe_loss(type(error).__name__, str(cause))) from error
    except _NO_CREDENTIALS as error:
        raise ErrorResponse("NoCredentials", message=str(error)) from error
    except boto.BotoCoreError as error:
        raise ErrorResponse(type(error).__name__, message=str(error)) from error
