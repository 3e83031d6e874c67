"""Large objects in parts: which parts, several at once, and the file that a killed fetch left.

No network in here, and nothing of S3: a directory's store fetches in the same way.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from nanochat_core.errors import StoreError
from nanochat_core.runtime.process_start import boot_id

PART = 16 << 20  # bytes
MAX_PARTS = 10_000  # of one object, everywhere
THREADS = 8  # that move parts, for all transfers of one store together
_NO_ALLOCATION = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}  # the file system cannot
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of an object."""

    index: int  # from 0
    start: int
    length: int

    @property
    def span(self) -> str:
        """As a range of HTTP."""
        return f"bytes={self.start}-{self.start + self.length - 1}"


def plan_parts(size: int, *, length: int) -> Sequence[Part]:
    """The parts of an object of `size` bytes; only the last may be shorter than `length`."""
    return [
        Part(index=index, start=start, length=min(length, size - start))
        for index, start in enumerate(range(0, size, length))
    ]


def part_length(size: int) -> int:
    """Bytes of one part, so that an object of `size` bytes has no more than MAX_PARTS."""
    return PART * max(1, -(-size // (PART * MAX_PARTS)))


def run_all(
    pool: Executor,
    items: Iterable[_Item],
    work: Callable[[_Item, threading.Event], None],
    *,
    at_once: int,
) -> None:
    """Do `work` on every item in the pool, `at_once` of them; raises the first failure.

    The event is set when one failed: the others end as soon as they can, and are waited for.
    """
    stop = threading.Event()
    running: set[Future[None]] = set()

    def settle(most: int) -> None:
        """Wait until `most` are running."""
        nonlocal running
        while len(running) > most:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    try:
        for item in items:
            settle(at_once - 1)
            running.add(pool.submit(work, item, stop))
        settle(0)
    except BaseException:
        stop.set()
        for future in running:
            future.cancel()
        wait(running)
        raise


class PartFile:
    """A file in the making, of its full size from the start, that knows which parts it has.

    After the bytes of the object comes a trailer: what object it is, and one byte for each part.
    The bytes of a part are written before its mark, which is all that a killed process needs.
    """

    def __init__(self, descriptor: int, path: Path, *, parts: Sequence[Part], mark: bytes) -> None:
        self.parts = parts
        self._file = descriptor
        self._path = path
        self._size = sum(part.length for part in parts)
        self._flags = self._size + len(mark)  # where they begin
        self._has = bytearray(len(parts))
        total = self._flags + len(parts)
        if os.fstat(descriptor).st_size == total:
            trailer = os.pread(descriptor, total - self._size, self._size)
            if trailer.startswith(mark):
                self._has[:] = trailer[len(mark) :]
                return
        os.ftruncate(descriptor, 0)
        _allocate(descriptor, total)
        os.pwrite(descriptor, mark, self._size)

    @property
    def missing(self) -> Sequence[Part]:
        """Parts that are still to be fetched."""
        return [part for part in self.parts if not self._has[part.index]]

    def write(self, start: int, data: bytes) -> None:
        """Bytes of the object, from any thread."""
        assert start + len(data) <= self._size, "more bytes than the object has"
        view = memoryview(data)
        with writing_to(self._path):
            while view:
                written = os.pwrite(self._file, view, start)
                view, start = view[written:], start + written

    def finish(self, part: Part) -> None:
        """All bytes of a part are written."""
        with writing_to(self._path):
            os.pwrite(self._file, b"\x01", self._flags + part.index)
        self._has[part.index] = 1

    def publish(self, final: Path) -> None:
        """Give the whole file its name, read-only."""
        assert not self.missing
        os.ftruncate(self._file, self._size)
        os.fchmod(self._file, 0o444)
        self._path.replace(final)


@contextlib.contextmanager
def open_part_file(final: Path, *, source: str, version: str, size: int) -> Generator[PartFile]:
    """The file that becomes `final`; what a killed fetch of the same source and version left.

    It stays for the next one when the caller fails. The machine's boot counts as part of the
    version: after a power cut a mark may be on the disk whose bytes are not.
    """
    parts = plan_parts(size, length=PART)
    mark = hashlib.sha256(f"{source}\n{version}\n{size}\n{PART}\n{boot_id()}".encode()).hexdigest()
    tag = hashlib.sha256(source.encode()).hexdigest()[:16]
    descriptor, path = _open_alone(final, tag)
    try:
        yield PartFile(descriptor, path, parts=parts, mark=mark.encode())
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing_to(path: Path) -> Generator[None]:
    """What the operating system refuses of a local file is a StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {(error.strerror or str(error)).lower()}",
            hint="free some space, or check who owns the directory",
        ) from error


def _open_alone(final: Path, tag: str) -> tuple[int, Path]:
    """A part file that nobody else has open; of two at the same time one gets a name of its own."""
    for name in (tag, uuid.uuid4().hex):
        path = final.with_name(f".{final.name}.{name}.part")
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except PermissionError:
                path.unlink()  # its process died when it was read-only already, but not renamed
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                break
            if _is_still(descriptor, path):
                return descriptor, path
            os.close(descriptor)  # it got its final name before we had the lock
    raise AssertionError("a name of our own is taken")


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the space, so that a full disk is known before hours of fetching."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _NO_ALLOCATION:
                raise
    os.ftruncate(descriptor, size)
