"""Transfer of large objects in parts: plan them, move several at once, resume a killed fetch.

This module knows neither the network nor S3: the directory store fetches in the same way.
"""

import contextlib
import errno
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infra.storage.files import try_flock, writing_to
from nanochat_core.runtime.process_start import boot_id

PART = 16 << 20  # bytes
MAX_PARTS = 10_000  # of one object, everywhere
THREADS = 8  # threads that move parts, for all transfers of one store together
_NO_ALLOCATION = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}  # the file system cannot
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A contiguous piece of an object."""

    index: int  # from 0
    start: int
    length: int

    @property
    def span(self) -> str:
        """Return the part as an HTTP Range header."""
        # Both ends of an HTTP range are inclusive.
        return f"bytes={self.start}-{self.start + self.length - 1}"


def plan_parts(size: int, *, length: int) -> Sequence[Part]:
    """Return the parts of an object of `size` bytes; only the last may be shorter than `length`."""
    return [
        Part(index=index, start=start, length=min(length, size - start))
        for index, start in enumerate(range(0, size, length))
    ]


def part_length(size: int) -> int:
    """Return the bytes of one part, so that an object of `size` has at most MAX_PARTS parts."""
    return PART * max(1, -(-size // (PART * MAX_PARTS)))


def run_all(
    pool: Executor,
    items: Iterable[_Item],
    work: Callable[[_Item, threading.Event], None],
    *,
    at_once: int,
) -> None:
    """Run `work` on every item in the pool, `at_once` at a time; raise the first failure.

    `work` also gets an event that is set when another item failed, and should then return. All
    running items are awaited before this returns or raises.
    """
    stop = threading.Event()
    running: set[Future[None]] = set()

    def settle(most: int) -> None:
        """Wait until at most `most` items are running."""
        nonlocal running
        while len(running) > most:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()

    try:
        for item in items:
            # At most `at_once` items are submitted, so their buffers in memory stay bounded.
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
    """A partly fetched file, of its full size from the start, that records which parts it has.

    A trailer follows the bytes of the object: a digest of the object's identity, and one byte for
    each part, which is set when the part is complete.
    """

    def __init__(self, descriptor: int, path: Path, *, parts: Sequence[Part], mark: bytes) -> None:
        self.parts = parts
        self._file = descriptor
        self._path = path
        self._size = sum(part.length for part in parts)
        self._flags = self._size + len(mark)  # offset of the bytes that mark complete parts
        self._has = bytearray(len(parts))
        total = self._flags + len(parts)
        if os.fstat(descriptor).st_size == total:
            trailer = os.pread(descriptor, total - self._size, self._size)
            if trailer.startswith(mark):
                self._has[:] = trailer[len(mark) :]
                return
        # Another object, or another version of it: emptied first, so that all flags are zero again.
        os.ftruncate(descriptor, 0)
        _allocate(descriptor, total)
        os.pwrite(descriptor, mark, self._size)

    @property
    def missing(self) -> Sequence[Part]:
        """Return the parts that are still to be fetched."""
        return [part for part in self.parts if not self._has[part.index]]

    def write(self, start: int, data: bytes) -> None:
        """Write bytes of the object at offset `start`; safe from any thread."""
        assert start + len(data) <= self._size, "more bytes than the object has"
        view = memoryview(data)
        with writing_to(self._path):
            while view:
                # May write fewer bytes than it was given.
                written = os.pwrite(self._file, view, start)
                view, start = view[written:], start + written

    def finish(self, part: Part) -> None:
        """Mark a part as complete, after all its bytes are written."""
        with writing_to(self._path):
            # After the bytes, so that a killed process never leaves a mark without its bytes. No
            # fsync: after a power cut boot_id differs, and the whole file is fetched again.
            os.pwrite(self._file, b"\x01", self._flags + part.index)
        self._has[part.index] = 1

    def publish(self, final: Path) -> None:
        """Make the complete file read-only and rename it to `final`."""
        assert not self.missing
        os.ftruncate(self._file, self._size)  # drops the trailer
        # Before the rename, so that the final name is never writable.
        os.fchmod(self._file, 0o444)
        self._path.replace(final)


@contextlib.contextmanager
def open_part_file(final: Path, *, source: str, version: str, size: int) -> Generator[PartFile]:
    """Open the part file that becomes `final`, or resume a killed fetch of the same version.

    It stays for the next fetch if the caller fails. The machine's boot counts as part of the
    version: after a power cut the disk may have a mark without the bytes of its part.
    """
    parts = plan_parts(size, length=PART)
    mark = hashlib.sha256(f"{source}\n{version}\n{size}\n{PART}\n{boot_id()}".encode()).hexdigest()
    # Named by the source alone: a new version replaces the part file of an old one.
    tag = hashlib.sha256(source.encode()).hexdigest()[:16]
    descriptor, path = _open_alone(final, tag)
    try:
        yield PartFile(descriptor, path, parts=parts, mark=mark.encode())
    finally:
        os.close(descriptor)


def _open_alone(final: Path, tag: str) -> tuple[int, Path]:
    """Open and lock a part file; a second process at the same time gets a file of its own."""
    for name in (tag, uuid.uuid4().hex):
        path = final.with_name(f".{final.name}.{name}.part")
        while True:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except PermissionError:
                if not path.exists():  # it is the directory that refuses
                    raise
                path.unlink()  # its process died when it was read-only already, but not renamed
                continue
            # The lock ends with its process, so a killed fetch never blocks the next one.
            if not try_flock(descriptor):
                os.close(descriptor)
                break
            # Its earlier owner may have renamed it to its final name between open and lock.
            if _is_still(descriptor, path):
                return descriptor, path
            os.close(descriptor)
    raise AssertionError("a name of our own is taken")


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the space, so that a full disk is reported before hours of fetching."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _NO_ALLOCATION:
                raise
    # Sparse where nothing was reserved. PartFile recognises a file of its own by this size.
    os.ftruncate(descriptor, size)
