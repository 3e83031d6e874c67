"""botocore's client of a server that speaks S3, and boto3's transfers over it.

The client reads profiles, SSO and roles from the files and variables of AWS. Its retries are off:
only `S3Store` can find out whether its own write took effect, so it repeats every request.
"""

import functools
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import botocore.session  # pyright: ignore[reportMissingTypeStubs]
from botocore.config import Config  # pyright: ignore[reportMissingTypeStubs]
from botocore.utils import (  # pyright: ignore[reportMissingTypeStubs]
    conditionally_calculate_md5,  # pyright: ignore[reportUnknownVariableType]
)
from s3transfer.manager import (  # pyright: ignore[reportMissingTypeStubs]
    TransferConfig,
    TransferManager,
)
from s3transfer.subscribers import BaseSubscriber  # pyright: ignore[reportMissingTypeStubs]

from infra.parallel import THREADS  # of all transfers of one store together
from infra.storage.base import OnBytes
from infra.storage.s3.errors import NoResponse
from nanochat_core.errors import StoreError

PART = 16 << 20  # bytes of a part of a large object
CONNECT_SECONDS = 5
READ_SECONDS = 60  # longest pause between two pieces of an answer


def make_client() -> Any:
    """Return a client from AWS's usual variables and files.

    NANOCHAT_S3_ADDRESSING says where a URL has the bucket's name. Without it that is the path, and
    the host name at AWS itself.
    """
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=4 * THREADS,
        s3={"addressing_style": os.environ.get("NANOCHAT_S3_ADDRESSING") or "auto"},
        # Servers differ in the checksums they know; every one of them knows Content-MD5.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
    )
    session: Any = botocore.session.Session()
    client = session.create_client("s3", config=config)
    client.meta.events.register("before-parse.s3", _refuse_redirect)
    for verb in ("PutObject", "UploadPart"):
        client.meta.events.register(f"before-call.s3.{verb}", conditionally_calculate_md5)
    return client


def is_aws(client: Any) -> bool:
    """Return whether a client speaks to Amazon's own servers."""
    host = re.sub(r"^https?://|[:/].*$", "", client.meta.endpoint_url)
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu"))


def _refuse_redirect(response_dict: Any, **_: object) -> None:
    """Handle botocore's event `before-parse`: it would ask a login page for the bucket's region."""
    names = {name.lower() for name in response_dict["headers"]}
    if 300 <= response_dict["status_code"] < 400 and "x-amz-bucket-region" not in names:
        raise NoResponse(f"a redirect ({response_dict['status_code']}) that is not S3's")


def make_manager(client: Any, repeat: Callable[[Callable[[], Any]], Any], tries: int) -> Any:
    """Return boto3's manager of all transfers of a client, which share their threads.

    `repeat` calls a request until it is answered; a body that is cut off is fetched `tries` times.
    """

    def ask(verb: str, **arguments: Any) -> Any:
        def send() -> Any:
            if "Body" in arguments:
                arguments["Body"].seek(0)
            answer = getattr(client, verb)(**arguments)
            if "Range" in arguments and "ContentRange" not in answer:
                answer["Body"].close()
                raise StoreError(
                    "the store answers a range request with the whole object",
                    hint="use a store that reads ranges; a proxy before it may ignore them",
                )
            return answer

        return repeat(send)

    requests = SimpleNamespace(meta=client.meta)
    for verb in (
        "create_multipart_upload",
        "upload_part",
        "complete_multipart_upload",
        "head_object",  # some versions of s3transfer ask for the size themselves
        "get_object",
    ):
        setattr(requests, verb, functools.partial(ask, verb))
    # Once: after a failed upload the store may be away, and gc aborts what is left.
    requests.abort_multipart_upload = client.abort_multipart_upload
    return TransferManager(
        requests,
        TransferConfig(
            multipart_threshold=PART,
            multipart_chunksize=PART,
            max_request_concurrency=THREADS,
            max_io_queue_size=4 * THREADS,
            num_download_attempts=tries,
        ),
    )


class Progress(BaseSubscriber):
    """Reports the bytes of a transfer."""

    def __init__(self, on_bytes: OnBytes) -> None:
        self._on_bytes = on_bytes

    def on_progress(self, future: Any, bytes_transferred: int, **_: object) -> None:
        """Handle the manager's event; a negative number means that they are transferred again."""
        self._on_bytes(bytes_transferred)
