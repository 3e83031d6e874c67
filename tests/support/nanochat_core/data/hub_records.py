"""What the mimic of the Hub in hub_server.py keeps: requests, commits, and what goes wrong."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

LARGE = 1 << 16  # bytes; a file of that size, or a parquet file, is kept apart (LFS)

# What a request asks for: information on a repository or its tree; where a file is and its ETag;
# the bytes of a file.
Kind: TypeAlias = Literal["api", "head", "bytes"]


@dataclass(kw_only=True)
class Request:
    """One request and how it was answered."""

    method: str
    kind: Kind
    path: str  # of the URL
    file: str  # in the repository, empty for the API
    range: str | None  # the header
    token: str | None  # the header Authorization
    status: int = 0


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What a repository holds at one commit."""

    name: str  # 40 hex digits
    files: Mapping[str, bytes]


@dataclass(kw_only=True)
class Fault:
    """Something that goes wrong with requests whose file, or URL, contains `text`."""

    kind: Kind
    text: str
    left: int | None  # times; None: always
    status: int = 0  # answer this and nothing else
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    spoils: bool = False  # one byte of the file is another
    pause: float = 0.0  # seconds before each chunk


def tree_of(commit: Commit) -> list[dict[str, object]]:
    folders = {str(folder) for path in commit.files for folder in Path(path).parents} - {"."}
    entries: list[dict[str, object]] = [
        {"type": "directory", "oid": "0" * 40, "size": 0, "path": folder} for folder in folders
    ]
    for path, data in commit.files.items():
        entry: dict[str, object] = {"type": "file", "path": path, "size": len(data)}
        if is_large(path, data):
            lfs = {"oid": sha256_of(data), "size": len(data), "pointerSize": 134}
            entry |= {"oid": git_id(pointer_to(data)), "lfs": lfs}
        else:
            entry["oid"] = git_id(data)
        entries.append(entry)
    return sorted(entries, key=lambda entry: str(entry["path"]))


def is_large(path: str, data: bytes) -> bool:
    return path.endswith(".parquet") or len(data) >= LARGE


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pointer_to(data: bytes) -> bytes:
    """Return what git stores in place of a large file."""
    lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{sha256_of(data)}")
    return "\n".join((*lines, f"size {len(data)}\n")).encode()


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
