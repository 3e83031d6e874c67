"""What is sent along with a body, so that the store finds out when it was damaged on its way.

MD5 is what every server that speaks S3 knows; only AWS surely knows the others. CRC-32 costs both
sides a third of what MD5 does, which is felt with large bodies, so those get it where the store is
seen to check it.
"""

import base64
import hashlib
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from infra.storage.answers import Refused
from infra.storage.base import Missing
from infra.storage.parts import Part

Checksum: TypeAlias = Literal["md5", "sha256", "crc32"]
CHECKSUMS: tuple[Checksum, ...] = ("md5", "sha256", "crc32")
_T = TypeVar("_T")
_BODY = b"whole"
_PART = Part(index=0, start=0, length=len(_BODY))


def checksum_of(data: bytes, kind: Checksum) -> dict[str, str]:
    """The arguments of a request that carries `data`."""
    if kind == "md5":
        return {"ContentMD5": _encode(hashlib.md5(data, usedforsecurity=False).digest())}
    if kind == "sha256":
        digest = _encode(hashlib.sha256(data).digest())
        return {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": digest}
    return {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": _encode(zlib.crc32(data).to_bytes(4))}


def algorithm_of(kind: Checksum) -> dict[str, str]:
    """The arguments of a request that announces parts."""
    return {} if kind == "md5" else {"ChecksumAlgorithm": kind.upper()}


class Uploads(Protocol):
    """Requests that write an object in parts. Raise Lost and Refused."""

    def begin_upload(self, key: str, checksum: Checksum) -> str:
        """Begin; the upload's id."""
        ...

    def put_part(
        self,
        key: str,
        upload: str,
        part: Part,
        data: bytes,
        checksum: Checksum,
        *,
        claim: bytes | None = None,
    ) -> Mapping[str, Any]:
        """Write a part; what `complete_upload` must be told of it."""
        ...

    def complete_upload(self, key: str, upload: str, parts: list[Mapping[str, Any]]) -> None:
        """Make the object of its parts."""
        ...

    def abort_upload(self, key: str, upload: str) -> None:
        """Drop the parts."""
        ...

    def get(self, key: str) -> bytes:
        """All bytes of an object."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object."""
        ...


def checks_parts(
    requests: Uploads,
    kind: Checksum,
    *,
    under: str,
    persist: Callable[[Callable[[], Any]], Any],
) -> bool:
    """Whether the store takes an object of parts with this checksum and refuses a damaged part.

    `persist` does one request, again if need be.
    """
    key = f"{under}/{uuid.uuid4().hex}/checksum"

    def ask(request: Callable[[], _T], *, no: Collection[str] = ()) -> _T | None:
        """What the store answers; None: it cannot do that, or gives one of the codes `no`."""

        def once() -> _T | None:
            try:
                return request()
            except Missing:
                return None
            except Refused as error:
                if error.is_passing and error.code not in no:
                    raise
                return None

        return persist(once)

    upload = ask(lambda: requests.begin_upload(key, kind))
    if upload is None:
        return False
    damaged = ask(
        lambda: requests.put_part(key, upload, _PART, b"other", kind, claim=_BODY),
        no=("BadDigest",),
    )
    told = ask(lambda: requests.put_part(key, upload, _PART, _BODY, kind))
    if damaged is not None or told is None:
        ask(lambda: requests.abort_upload(key, upload))
        return False
    ask(lambda: requests.complete_upload(key, upload, [told]))
    is_whole = ask(lambda: requests.get(key)) == _BODY
    ask(lambda: requests.delete(key))
    return is_whole


def _encode(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
