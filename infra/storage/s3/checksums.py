"""Checksums sent with a request's body, so that the store can detect damage on the way.

Every S3-compatible server knows MD5; only AWS is sure to know the others. CRC-32 takes a fifth of
MD5's time on both sides, which matters for large bodies, so those get it where the store says that
it knows it.
"""

import base64
import hashlib
import zlib
from typing import Literal, TypeAlias

Checksum: TypeAlias = Literal["md5", "sha256", "crc32"]
CHECKSUMS: tuple[Checksum, ...] = ("md5", "sha256", "crc32")


def checksum_of(data: bytes, kind: Checksum) -> dict[str, str]:
    """Return the arguments of a request that carries `data`."""
    # MD5 only detects damage here; without the flag Python refuses it on FIPS systems.
    if kind == "md5":
        return {"ContentMD5": _encode(hashlib.md5(data, usedforsecurity=False).digest())}
    if kind == "sha256":
        digest = _encode(hashlib.sha256(data).digest())
        return {"ChecksumAlgorithm": "SHA256", "ChecksumSHA256": digest}
    return {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": _encode(zlib.crc32(data).to_bytes(4))}


def algorithm_of(kind: Checksum) -> dict[str, str]:
    """Return the arguments of a request that begins a multipart upload."""
    # Content-MD5 is a header of each part; only the newer checksums are announced at the start.
    return {} if kind == "md5" else {"ChecksumAlgorithm": kind.upper()}


def _encode(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
