"""Clients of servers that speak S3.

They read profiles, SSO and roles from the files and variables of AWS. Their retries are off: only
a whole operation can find out whether its own write took effect, so `S3Store` repeats those.
"""

import re
from typing import Any

import botocore.session  # pyright: ignore[reportMissingTypeStubs]
from botocore.config import Config  # pyright: ignore[reportMissingTypeStubs]
from botocore.utils import (  # pyright: ignore[reportMissingTypeStubs]
    conditionally_calculate_md5,  # pyright: ignore[reportUnknownVariableType]
)

from infra.parallel import THREADS  # of all transfers of one store together
from infra.storage.s3.errors import NoResponse

CONNECT_SECONDS = 5
READ_SECONDS = 60  # longest pause between two pieces of an answer


def make_client(addressing: str | None) -> Any:
    """Return a client from AWS's usual variables and files; None means botocore's addressing."""
    config = Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=4 * THREADS,
        s3={"addressing_style": addressing or "auto"},
        # Servers differ in the checksums they know; every one of them knows Content-MD5.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        tcp_keepalive=True,
    )
    session: Any = botocore.session.Session()
    client = session.create_client("s3", config=config)
    client.meta.events.register("before-parse.s3", _refuse_redirect)
    for verb in ("PutObject", "UploadPart"):
        client.meta.events.register(f"before-call.s3.{verb}", _add_md5)
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


def _add_md5(params: Any, **_: object) -> None:
    """Handle botocore's event `before-call`: give the body a checksum, unless it has one."""
    if "Content-MD5" not in params["headers"]:
        conditionally_calculate_md5(params)
