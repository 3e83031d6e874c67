"""Digests and locks of local files, and one-line errors for a disk that refuses."""

import contextlib
import fcntl
import hashlib
import uuid
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import IO, Any

from nanochat_core.errors import NanochatError, StoreError, reason_of


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a local file as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def try_flock(file: IO[Any] | int) -> bool:
    """Lock an open file unless a process has it locked; return whether it is locked now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def writing(
    path: Path,
    kind: type[NanochatError],
    *,
    hint: str = "check that NANOCHAT_HOME is a directory of yours on a disk with free space",
) -> Generator[None]:
    """Convert an OSError of the block, which writes to `path`, to a `kind` of error."""
    try:
        yield
    except OSError as error:
        raise kind(
            f"{path} cannot be written: {reason_of(error)}",
            hint=hint,
        ) from error


@contextlib.contextmanager
def replacing(path: Path, *, mode: int | None = 0o444) -> Generator[Path]:
    """Yield a hidden path next to `path`, whose file then gets `mode`, if any, and replaces `path`.

    After an error the file is removed, and `path` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        yield temporary
        # Before the rename, so that the final name is never writable.
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees all of it, or the older one."""
    if path.exists() and not path.is_file():  # a device, a pipe: it is written to, never replaced
        path.write_bytes(data)
        return
    with replacing(path, mode=None) as temporary:
        temporary.write_bytes(data)


# Of the file that a store fetches to.
writing_to = partial(
    writing, kind=StoreError, hint="free some space, or check who owns the directory"
)
