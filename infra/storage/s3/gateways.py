"""Recognise answers that are not the store's: a login page, a redirect, a misrouted proxy.

Such an answer is often "200 OK". It would pass for a listing of an empty store, or for the
confirmation of a write. So each answer must look like one of S3 before it is parsed.
"""

import re
from collections.abc import Mapping
from typing import Any

from infra.storage.s3.errors import NOT_S3, REDIRECT, ErrorResponse

_ROOT = re.compile(rb"\s*(?:<\?xml[^>]*>)?\s*(?:<!--.*?-->\s*)*<(?:[\w.-]+:)?(\w+)", re.DOTALL)
_ROOTS = {
    "ListObjectsV2": "ListBucketResult",
    "ListMultipartUploads": "ListMultipartUploadsResult",
    "CreateMultipartUpload": "InitiateMultipartUploadResult",
    "CompleteMultipartUpload": "CompleteMultipartUploadResult",
}
# S3 explains these errors in a body with the root element Error.
_EXPLAINED = {400, 401, 403, 404}  # not to a HEAD, whose answer has no body
_OF_OBJECTS = {"PutObject", "UploadPart", "GetObject", "HeadObject"}  # S3 answers with an ETag


def check_response(operation_model: Any, response_dict: Any, **_: object) -> None:
    """Handle botocore's event `before-parse`: refuse what is not an answer of S3."""
    body = response_dict["body"]
    try:
        response_dict["status_code"] = check_answer(
            operation_model.name,
            response_dict["status_code"],
            {name.lower(): value for name, value in response_dict["headers"].items()},
            body if isinstance(body, bytes) else b"",  # an object comes as a stream
        )
    except ErrorResponse:
        if not isinstance(body, bytes):
            body.close()  # no caller gets this stream, which holds a connection
        raise


def check_answer(operation: str, status: int, headers: Mapping[str, str], body: bytes) -> int:
    """Return an answer's status, or raise ErrorResponse if it is not one of S3.

    `headers` have lower-case names; `body` is empty where the answer is an object.
    """
    found = _ROOT.match(body)
    root = found.group(1).decode() if found else ""
    if root == "Error":
        # S3 begins a long completion with 200 and may still fail: that is an error 500.
        return 500 if status == 200 else status
    if 300 <= status < 400:
        if "x-amz-bucket-region" in headers:  # botocore follows it to that region, or names it
            return status
        raise ErrorResponse(REDIRECT, status=status, headers=headers)
    is_page = root.lower() == "html" or body.lstrip()[:9].lower() == b"<!doctype"
    # Some stores send errors without a body; the request id shows that it is a store.
    lacks_error = status in _EXPLAINED and not operation.startswith("Head")
    lacks_error &= bool(body) or "x-amz-request-id" not in headers
    lacks_root = status < 300 and root != _ROOTS.get(operation, root)
    lacks_tag = status < 300 and operation in _OF_OBJECTS and "etag" not in headers
    # A proxy's 5xx is retried anyway, so it may keep its status.
    if lacks_root or lacks_tag or lacks_error or (is_page and status < 500):
        said = "a web page" if is_page else "something that is not S3"
        raise ErrorResponse(NOT_S3, status=status, message=said, headers=headers)
    return status


def check_listing(bucket: str, named: str | None) -> None:
    """Raise ErrorResponse if a listing is not of this bucket."""
    if named != bucket:
        of = f"bucket '{named}'" if named else "no bucket"
        raise ErrorResponse(NOT_S3, status=200, message=f"a listing of {of}")
