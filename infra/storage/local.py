"""A store in a directory (file:///path): the default, and the store of a team with a shared disk.

Objects are read-only files. A write goes to a temporary file, is flushed to the disk, gets its name
in one step (a hard link where the name must be free) and then the directory is flushed: what was
reported as written survives a power cut, and a reader never sees half an object.
"""

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

from infra.storage.base import Entry, Missing, check_key
from nanochat_core.errors import StoreError
from nanochat_core.job import sync_directory

_TEMPORARY = ".tmp"  # no key can have a segment of this name
_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_HINTS = {
    errno.ENOSPC: "free some space, or point NANOCHAT_STORE at another disk",
    errno.EDQUOT: "free some space, or point NANOCHAT_STORE at another disk",
    errno.EACCES: "check who owns it, or point NANOCHAT_STORE at a directory of yours",
    errno.EPERM: "check who owns it, or point NANOCHAT_STORE at a directory of yours",
    errno.EROFS: "the disk is mounted read-only; point NANOCHAT_STORE elsewhere",
}


class LocalStore:
    """Objects in `directory`, which is created by the first write if its parent exists.

    A missing parent is an error: it is how a disk that is not mounted looks.
    """

    def __init__(self, directory: Path) -> None:
        assert directory.is_absolute(), directory
        self._root = directory

    @property
    def url(self) -> str:
        """See Store."""
        return self._root.as_uri()

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        final = self._path(key)
        with self._writing(), self._temporary() as temporary:
            _write(temporary, data)
            self._replace(temporary, final)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        final = self._path(key)
        with self._writing(), self._temporary() as temporary:
            _write(temporary, data)
            _make_directory(final.parent)
            try:
                os.link(temporary, final)
                is_ours = True
            except FileExistsError:
                if final.is_dir():
                    raise
                # A network disk may lose the answer and repeat the call: two names are ours.
                is_ours = os.stat(temporary).st_nlink > 1
            sync_directory(final.parent)  # for the loser too, who goes on from the winner's bytes
            return is_ours

    def get(self, key: str) -> bytes:
        """See Store."""
        path = self._path(key)
        with self._reading(key):
            return path.read_bytes()

    def head(self, key: str) -> Entry:
        """See Store."""
        path = self._path(key)
        with self._reading(key):
            if path.is_dir():
                raise Missing(key)
            status = path.stat()
        return Entry(key=key, size=status.st_size, modified=status.st_mtime)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See Store."""
        directory = prefix.rpartition("/")[0]
        start = self._path(directory) if directory else self._root
        with self._writing():
            self._check_reachable()
            entries = [e for e in self._walk(start) if e.key.startswith(prefix)]
        yield from sorted(entries, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        """See Store."""
        path = self._path(key)
        with contextlib.suppress(Missing), self._reading(key):
            path.unlink()
            sync_directory(path.parent)

    def upload(self, key: str, path: Path) -> None:
        """See Store."""
        final = self._path(key)
        with path.open("rb") as source, self._writing(), self._temporary() as temporary:
            with temporary.open("xb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
                file.flush()
                _seal(file.fileno())
            self._replace(temporary, final)

    def fetch(self, key: str, path: Path) -> None:
        """See Store.

        The file shares its bytes with the object where the file system can and where being
        read-only protects both: root may write to anything, so root gets a copy.
        """
        source = self._path(key)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        with self._reading(key):
            if source.is_dir():
                raise Missing(key)
            source.stat()
        try:
            with self._writing():
                _link_or_copy(source, temporary)
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _walk(self, directory: Path) -> Iterator[Entry]:
        try:
            found = list(os.scandir(directory))
        except _NOT_THERE:
            return
        for item in found:
            if item.name.startswith("."):
                continue
            if item.is_dir(follow_symlinks=False):
                yield from self._walk(directory / item.name)
            elif item.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    status = item.stat()
                    key = (directory / item.name).relative_to(self._root).as_posix()
                    yield Entry(key=key, size=status.st_size, modified=status.st_mtime)

    def _replace(self, temporary: Path, final: Path) -> None:
        _make_directory(final.parent)
        temporary.replace(final)
        sync_directory(final.parent)

    @contextlib.contextmanager
    def _temporary(self) -> Generator[Path]:
        """A free name on the store's own file system; what is left under it is removed."""
        self._check_reachable()
        _make_directory(self._root / _TEMPORARY)
        path = self._root / _TEMPORARY / uuid.uuid4().hex
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _check_reachable(self) -> None:
        if self._root.is_dir():
            return
        if self._root.exists():
            raise StoreError(f"store {self.url} is a file, not a directory")
        if not self._root.parent.is_dir():
            raise StoreError(
                f"store {self.url} cannot be reached: {self._root.parent} does not exist",
                hint="create that directory, or mount the disk it is on",
            )

    @contextlib.contextmanager
    def _reading(self, key: str) -> Generator[None]:
        """Not there is Missing, but only in a store that is there."""
        with self._writing():
            try:
                yield
            except _NOT_THERE:
                self._check_reachable()
                raise Missing(key) from None

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """What the operating system refuses is a StoreError."""
        try:
            yield
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            raise StoreError(
                f"store {self.url} refuses: {(error.strerror or str(error)).lower()}{where}",
                hint=_HINTS.get(error.errno or 0, "check the disk, then run the command again"),
            ) from error


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        _seal(file.fileno())


def _seal(descriptor: int) -> None:
    """Read-only and on the disk."""
    os.fchmod(descriptor, 0o444)
    os.fsync(descriptor)


def _link_or_copy(source: Path, target: Path) -> None:
    if os.geteuid() != 0:
        with contextlib.suppress(OSError):  # another file system, or one without hard links
            os.link(source, target)
            return
    shutil.copyfile(source, target)
    target.chmod(0o444)


def _make_directory(path: Path) -> None:
    """Like mkdir -p, each new name flushed to the disk."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)
