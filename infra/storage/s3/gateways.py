"""Recognise what answers in a store's place: a login page, a redirect, a misrouted proxy.

Such an answer is often "200 OK". Taken for a listing it would be an empty store, and taken for the
answer to a write it would be a write. So each answer must look like that of S3 before it is parsed.
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
    "CopyObject": "CopyObjectResult",
    "UploadPartCopy": "CopyPartResult",
}
_EXPLAINED = {400, 401, 403, 404}  # S3 sends an Error with these, except to a HEAD
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
            body.close()  # no caller gets the stream, and it holds a connection
        raise


def check_answer(operation: str, status: int, headers: Mapping[str, str], body: bytes) -> int:
    """Return an answer's status, or raise Refused if it is not one of S3.

    `headers` have lower-case names; `body` is empty where the answer is an object. S3 may also
    refuse with 200 and an Error: that is a 500.
    """
    found = _ROOT.match(body)
    root = found.group(1).decode() if found else ""
    if root == "Error":
        return 500 if status == 200 else status
    if 300 <= status < 400:
        if "x-amz-bucket-region" in headers:  # botocore follows it to that region, or names it
            return status
        raise ErrorResponse(REDIRECT, status=status, headers=headers)
    is_page = root.lower() == "html" or body.lstrip()[:9].lower() == b"<!doctype"
    # An empty answer with the id of a request may be of a store that does not explain itself.
    lacks_error = status in _EXPLAINED and not operation.startswith("Head")
    lacks_error &= bool(body) or "x-amz-request-id" not in headers
    lacks_root = status < 300 and root != _ROOTS.get(operation, root)
    lacks_tag = status < 300 and operation in _OF_OBJECTS and "etag" not in headers
    # A 5xx of a proxy is passing without this.
    if lacks_root or lacks_tag or lacks_error or (is_page and status < 500):
        said = "a web page" if is_page else "something that is not S3"
        raise ErrorResponse(NOT_S3, status=status, message=said, headers=headers)
    return status


def check_listing(bucket: str, named: str | None) -> None:
    """Raise Refused if a listing is not of this bucket."""
    if named != bucket:
        of = f"bucket '{named}'" if named else "no bucket"
        raise ErrorResponse(NOT_S3, status=200, message=f"a listing of {of}")
