"""A store in a directory (file:///path): the default, and the store of a team with a shared disk.

Objects are read-only files. A write is flushed to a temporary file, gets its name atomically, and
then the directory is flushed: no reader sees half an object, and it survives a power cut.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
import uuid
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from infra.storage.base import (
    MAX_RECORD,
    ObjectInfo,
    ObjectNotFound,
    OnBytes,
    StoreUnavailable,
    VersionedObject,
    check_key,
    check_size,
    ignore_bytes,
)
from infra.storage.files import replacing, writing_to
from infra.storage.plain_files import (
    NOT_THERE,
    check_folder,
    info_of,
    list_plain,
    open_plain,
    read_plain,
)
from nanochat_core.errors import StoreError, reason_of
from nanochat_core.job import sync_directory

_BLOCK = 1 << 20  # bytes
_TEMPORARY = ".tmp"  # no key can have a segment of this name
_UNFINISHED = re.compile(r"[0-9a-f]{32}")  # the names in it
_SWAP_LOCK = "swap.lock"  # in it too
_HINTS = {
    **dict.fromkeys(
        (errno.EPERM, errno.EOPNOTSUPP),
        "check who owns it, and that its file system has hard links: exFAT has none",
    ),
    **dict.fromkeys(
        (errno.ENOLCK, errno.ENOSYS),
        "its file system locks no files: mount it with locks, or use an S3 store",
    ),
}
_ELSEWHERE = "free some space or check the owner, or point NANOCHAT_STORE at another directory"

# Errors of a file server that is unreachable, or of a failing disk.
_AWAY = {errno.EIO, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN}
_OF_THE_WAY = (TimeoutError, ConnectionError, BlockingIOError, InterruptedError)


class LocalStore:
    """Objects in `directory`, which is created by the first write if its parent exists.

    A missing parent is an error: a disk that is not mounted looks like that. A directory that this
    process has seen and that vanished raises StoreUnavailable: its disk was unmounted.
    `directory` may be a link. No link below it is followed; see check_folder.
    """

    def __init__(self, directory: Path) -> None:
        assert directory.is_absolute(), directory
        self._root = directory
        self._was_seen = False

    @property
    def url(self) -> str:
        """See Store."""
        return self._root.as_uri()

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        self._write(key, [data])

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        final = self._path(key)
        with self._written([data]) as temporary:
            self._make_directory(final.parent)
            try:
                os.link(temporary, final)  # unlike a rename, fails if the name exists
                is_ours = True
            except FileExistsError:
                # NFS may repeat a link call that succeeded: then these are our own bytes.
                is_ours = read_plain(final, limit=MAX_RECORD)[0] == data
            # For the loser too: it continues from the winner's object, which must be durable.
            sync_directory(final.parent)
            return is_ours

    def put_if_same(self, key: str, data: bytes, *, version: str) -> bool:
        """See Store."""
        final = self._path(key)
        with (
            self._written([data]) as temporary,
            self._swapping(temporary.with_name(_SWAP_LOCK)),
        ):
            try:
                found, _ = read_plain(final, limit=MAX_RECORD)
            except NOT_THERE:
                self._check_reachable()  # or the object went with the disk
                return False
            if found != data:
                if _version(found) != version:
                    return False
                temporary.replace(final)
            sync_directory(final.parent)
            return True

    def get(self, key: str, *, size: int | None = None) -> bytes:
        """See Store."""
        with self._reading(key):
            return read_plain(self._path(key), limit=MAX_RECORD if size is None else size)[0]

    def get_stored(self, key: str) -> VersionedObject:
        """See Store."""
        with self._reading(key):
            data, written = read_plain(self._path(key), limit=MAX_RECORD)
        age = max(0.0, time.time() - written)
        return VersionedObject(data=data, version=_version(data), age=age)

    def head(self, key: str) -> ObjectInfo:
        """See Store."""
        with self._reading(key), open_plain(self._path(key)) as file:
            return info_of(key, os.fstat(file.fileno()))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store."""
        directory = prefix.rpartition("/")[0]
        start = f"{check_key(directory)}/" if directory else ""
        with self._writing():
            self._check_reachable()
            check_folder(self._root, directory)
            entries = [e for e in list_plain(self._root, start) if e.key.startswith(prefix)]
            self._check_reachable()  # of a disk that went meanwhile too little was found
        yield from sorted(entries, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        """See Store."""
        path = self._path(key)
        with contextlib.suppress(ObjectNotFound), self._reading(key):
            path.unlink()
            sync_directory(path.parent)

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store."""
        with path.open("rb") as source:
            self._write(key, _blocks(source, on_bytes))

    def fetch(self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store.

        The file is a hard link to the object where that is safe: root may write to read-only
        files, so root gets a copy. So does a user of another user's object, since its owner could
        change the bytes after they were verified.
        """
        source = self._path(key)
        with self._reading(key), open_plain(source) as object_, writing_to(path):
            status = os.fstat(object_.fileno())
            check_size(source.as_uri(), status.st_size, size)
            is_ours = os.geteuid() == status.st_uid != 0
            if is_ours and _link(source, path):
                on_bytes(status.st_size)
                return
            with replacing(path) as temporary, temporary.open("xb") as copy:
                copy.writelines(_blocks(object_, on_bytes))

    def abort_stale_uploads(self, *, before: float) -> int:
        """See Store."""
        removed = 0
        with self._writing():
            check_folder(self._root, _TEMPORARY)
            for path in list((self._root / _TEMPORARY).glob("*")):
                if not _UNFINISHED.fullmatch(path.name):
                    continue
                # Its writer was quicker; or a directory, which is not ours.
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    if path.lstat().st_mtime < before:
                        path.unlink()
                        removed += 1
            self._check_reachable()
        return removed

    def check_conditions(self) -> None:
        """See Store. Checks nothing: put_if_absent raises StoreError without hard links."""

    def _path(self, key: str) -> Path:
        with self._writing():
            check_folder(self._root, check_key(key).rpartition("/")[0])
        return self._root / key

    def _write(self, key: str, blocks: Iterable[bytes]) -> None:
        final = self._path(key)
        with self._written(blocks) as temporary:
            self._make_directory(final.parent)
            temporary.replace(final)
            sync_directory(final.parent)

    def _make_directory(self, path: Path) -> None:
        """Create a directory of the store and its parents, and flush each new name to the disk."""
        if path.is_dir():
            return
        if path != self._root:
            self._make_directory(path.parent)
        elif self._was_seen:
            self._check_reachable()  # its disk is gone: a new one would lie under the mount point
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)

    @contextlib.contextmanager
    def _written(self, blocks: Iterable[bytes]) -> Generator[Path]:
        """Yield a path on the store's file system with these bytes, which are on the disk."""
        with self._writing():
            self._check_reachable()
            check_folder(self._root, _TEMPORARY)
            self._make_directory(self._root / _TEMPORARY)
            self._was_seen = True
            path = self._root / _TEMPORARY / uuid.uuid4().hex
            try:
                with path.open("xb") as file:
                    file.writelines(blocks)
                    file.flush()
                    os.fchmod(file.fileno(), 0o444)
                    os.fsync(file.fileno())
                yield path
            finally:
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _swapping(self, lock: Path) -> Generator[None]:
        """Wait for the lock of all swaps and hold it.

        The kernel or file server releases that of a killed process. A swap takes milliseconds.
        """
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(PermissionError):  # another user's, who has done it
                os.fchmod(descriptor, 0o666)  # NFS locks only what may be written
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _check_reachable(self) -> None:
        was_seen = self._was_seen  # read first: another thread may be creating the directory
        if self._root.is_dir():
            self._was_seen = True
            return
        if was_seen:
            raise StoreUnavailable(
                f"store {self.url} is gone", hint="mount the disk that it is on again"
            )
        if self._root.exists() and not self._root.is_dir():  # asked again: just created, perhaps
            raise StoreError(f"store {self.url} is a file, not a directory")
        if not self._root.parent.is_dir():
            raise StoreError(
                f"store {self.url} cannot be reached: {self._root.parent} does not exist",
                hint="create that directory, or mount the disk it is on",
            )

    @contextlib.contextmanager
    def _reading(self, key: str) -> Generator[None]:
        """Turn a missing file into ObjectNotFound, but only if the store itself is reachable."""
        with self._writing():
            # Before and after: a disk that is mounted again meanwhile has not lost the file.
            self._check_reachable()
            try:
                yield
            except NOT_THERE:
                self._check_reachable()
                raise ObjectNotFound(key) from None

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """Turn an OSError into a StoreError."""
        try:
            yield
        except OSError as error:
            if isinstance(error, NOT_THERE):
                with self._writing():
                    self._check_reachable()
            where = f": {error.filename}" if error.filename else ""
            is_away = isinstance(error, _OF_THE_WAY) or error.errno in _AWAY
            kind = StoreUnavailable if is_away else StoreError
            raise kind(
                f"store {self.url} refuses: {reason_of(error)}{where}",
                hint=_HINTS.get(error.errno or 0, _ELSEWHERE),
            ) from error


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _blocks(file: BinaryIO, on_bytes: OnBytes) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block
        on_bytes(len(block))


def _link(source: Path, target: Path) -> bool:
    """Make `target` a hard link to `source`, over an older file; return whether it is one."""
    # An OSError: another file system, or one without hard links.
    with contextlib.suppress(OSError), replacing(target, mode=None) as temporary:
        os.link(source, temporary)
        return True
    return False
