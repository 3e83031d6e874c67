"""List, open and read the files of a directory store: plain files in real folders only.

A FIFO would wait for a writer for ever, /dev/zero never ends, and a link leads out of the store.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from infra.storage.base import BadObject, ObjectInfo, check_size
from nanochat_core.errors import StoreError

# O_NONBLOCK: opening a FIFO would otherwise wait for its writer before fstat can refuse it.
_NO_LINK_NO_WAIT = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def check_folder(root: Path, name: str) -> None:
    """Raise StoreError if a folder from below `root` to `name` ("a/b": `a` or `a/b`) is a link.

    `root` itself, and what is above it, may be a link. A folder need not exist. This protects from
    links that lie there, not from one that replaces a folder during the call.
    """
    path = str(root)
    for part in name.split("/") if name else ():
        path = f"{path}/{part}"
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISLNK(mode):
            raise StoreError(
                f"{Path(path).as_uri()} is a link, and a store follows none below its root",
                hint="remove the link; if it leads to objects of yours, move them to its place",
            )


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file to read. Raises OSError, and BadObject if it is no file and no folder."""
    try:
        # With an opener: of a folder, which cannot be read, `os.fdopen` would leave the descriptor.
        file = open(path, "rb", opener=lambda p, _: os.open(p, _NO_LINK_NO_WAIT))  # noqa: SIM115
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise BadObject(path.as_uri(), "is not a plain file") from error
        raise
    # The open file is checked, not the path: another process may replace the path meanwhile.
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise BadObject(path.as_uri(), "is not a plain file")
    return file


def read_plain(path: Path, *, limit: int) -> tuple[bytes, float]:
    """Return a plain file's bytes, `limit` at most, and when it was written, in unix seconds."""
    with open_plain(path) as file:
        status = os.fstat(file.fileno())
        check_size(path.as_uri(), status.st_size, limit)
        return file.read(limit), status.st_mtime


def list_plain(root: Path, folder: str) -> Iterator[ObjectInfo]:
    """Yield the objects below `folder` of a store: "", or a key's beginning that ends with '/'."""
    # Strings: a Path for each object costs more than the calls to the disk.
    try:
        found = list(os.scandir(f"{root}/{folder}"))
    except NOT_THERE:
        return
    for item in found:
        if item.name.startswith("."):
            continue
        if item.is_dir(follow_symlinks=False):
            yield from list_plain(root, f"{folder}{item.name}/")
        elif item.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                yield info_of(f"{folder}{item.name}", item.stat())


def info_of(key: str, status: os.stat_result) -> ObjectInfo:
    """Return an object's key, size and time."""
    return ObjectInfo(key=key, size=status.st_size, modified=status.st_mtime)
