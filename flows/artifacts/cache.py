"""Fetched artifacts on this machine: verified at each use, shared by processes, limited in size.

{stage}/{fingerprint}-{record}/          files/, logs/, manifest.json
{stage}/.{fingerprint}-{record}.new/     an unfinished fetch; the next one goes on with it
{stage}/{fingerprint}-{record}.used      locked shared by whoever uses it; its time is the last use
{stage}/{fingerprint}-{record}.lock      held by the one who fetches

What is in use is known by a kernel lock, which ends with its process, however that ends. It is
flock and not the filelock package, because many may use an artifact at once and that package has no
shared locks.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from flows.artifacts.transfer import Place, fetch_verified, files_below, find_missing
from flows.identity.fingerprint import short
from flows.identity.manifest import Manifest
from flows.leases import file_lock
from infra.storage.base import OnBytes, Store, ignore_bytes
from nanochat_core.errors import ArtifactError

_NAME = re.compile(r"\.?(?P<name>[0-9a-f]{12}-[0-9a-f]{12})(\.new|\.used|\.lock)?")
_LEAVING = re.compile(r"\.[0-9a-f]{12}-[0-9a-f]{12}\.[0-9a-f]{32}\.old")
_BLOCK = 512  # bytes; st_blocks counts in these on every file system
_SECONDS_BETWEEN_TRIES = 0.1
_PATIENCE = 10.0  # seconds
_HINT = "check that NANOCHAT_HOME is a directory of yours on a disk with free space"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """Where one artifact lies in a cache."""

    directory: Path

    @property
    def unfinished(self) -> Path:
        return self.directory.with_name(f".{self.directory.name}.new")

    @property
    def used(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.used")

    @property
    def lock(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.lock")

    @property
    def exists(self) -> bool:
        return self.directory.exists() or self.unfinished.exists()

    @property
    def leaving(self) -> Path:
        return self.directory.with_name(f".{self.directory.name}.{uuid.uuid4().hex}.old")


class Cache:
    """Fetched artifacts in `directory`, at most `limit` bytes of them beside what is in use.

    What it handed out is in use until it is closed, or its process ends. Use it as a context
    manager where it does not live as long as the process.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self._lock = threading.Lock()
        self._held: dict[Path, int] = {}  # plain descriptors: one forgotten stays open

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """What was handed out is no longer in use."""
        with self._lock:
            held, self._held = self._held, {}
            for descriptor in held.values():
                with contextlib.suppress(OSError):  # of a disk that is full
                    os.utime(descriptor)  # used until here
                os.close(descriptor)

    def find_copy(self, manifest: Manifest) -> Path | None:
        """The artifact's directory, in use from now on, if there is one. It is not verified."""
        entry = self._entry(manifest)
        if not _is_directory(entry.directory):
            return None
        with _writing(entry.directory):
            self._use(entry)
        return entry.directory if _is_directory(entry.directory) else None

    def use(self, manifest: Manifest) -> Path:
        """The place of an artifact, in use from now on, whether it is there or not."""
        entry = self._entry(manifest)
        with _writing(entry.directory):
            stage = entry.directory.parent
            stage.mkdir(parents=True, exist_ok=True)
            if stage.is_symlink():
                raise ArtifactError(
                    f"{stage} is a link to {stage.resolve()}, and the cache holds no links",
                    hint="remove it; to have the cache elsewhere, set NANOCHAT_HOME",
                )
            self._use(entry)
        return entry.directory

    def make_room(self) -> None:
        """Drop artifacts until the limit is kept: the least recently used first, none in use.

        Also what processes that were killed left behind. Raises ArtifactError when it cannot.
        """
        with _writing(self.directory), _alone(self.directory / ".lock"):
            entries = sorted(self._entries(), key=_last_use)
            sizes = [_disk_use(e.directory) + _disk_use(e.unfinished) for e in entries]
            total = sum(sizes)
            for entry, size in zip(entries, sizes, strict=True):
                # One that takes no space of its own frees none.
                is_needed = size if total > self.limit else not entry.exists
                if is_needed and _drop(entry):
                    total -= size

    def _entry(self, manifest: Manifest) -> _Entry:
        # By the whole manifest: another store's artifact of the same content has other records,
        # which are not to replace those that a job is reading.
        record = hashlib.sha256(manifest.to_json()).hexdigest()
        name = f"{short(manifest.fingerprint)}-{short(record)}"
        return _Entry(directory=self.directory / manifest.stage / name)

    def _use(self, entry: _Entry) -> None:
        with self._lock:
            held = self._held.get(entry.used)
            if held is None:
                held = self._held[entry.used] = _lock_shared(entry.used)
            os.utime(held)

    def _entries(self) -> Iterator[_Entry]:
        """What is there, leftovers of killed processes removed. Strangers are left alone."""
        for stage in self.directory.iterdir():
            if not _is_directory(stage):
                continue
            found = sorted(path.name for path in stage.iterdir())
            for name in found:
                if _LEAVING.fullmatch(name):
                    shutil.rmtree(stage / name, ignore_errors=True)
            names = {match["name"] for name in found if (match := _NAME.fullmatch(name))}
            for name in sorted(names):
                yield _Entry(directory=stage / name)


def fetch(
    store: Store, manifest: Manifest, cache: Cache, *, on_bytes: OnBytes = ignore_bytes
) -> Path:
    """A local directory with the artifact: files/, logs/ and manifest.json, every byte verified.

    A copy in `cache` is used again, after it was verified too; what is damaged in it or missing is
    fetched, file by file. The directory is in use until the cache is closed. Raises ArtifactError,
    naming the file, when the store's own bytes are damaged or gone.
    """
    directory = cache.use(manifest)
    entry = _Entry(directory=directory)
    if not _is_whole(manifest, directory):
        with _fetching(entry.lock, on_bytes), _writing(directory):
            _complete(store, manifest, entry, on_bytes)
        cache.make_room()
    return directory


def _complete(store: Store, manifest: Manifest, entry: _Entry, on_bytes: OnBytes) -> None:
    """Fetch what is missing. A new directory gets its name when all is there.

    One that exists is mended in place: another process may be reading the whole files in it.
    """
    if not _is_directory(entry.directory):
        entry.directory.unlink(missing_ok=True)  # a link
    exists = entry.directory.exists()
    target = entry.directory if exists else entry.unfinished / "whole"
    for folder in ("files", "logs"):
        if not _is_directory(target / folder):
            (target / folder).unlink(missing_ok=True)
            (target / folder).mkdir(parents=True)
    places = list(_places(manifest, target))
    for intruder in set(_files_below(target)) - {path for _, path in places}:
        intruder.unlink()
    missing = find_missing(places)
    for path in (*(path for _, path in missing), target / "manifest.json"):
        shutil.rmtree(path, ignore_errors=True)  # nothing happens unless it is a directory
    scratch = entry.unfinished / "parts"
    fetch_verified(store, manifest, missing, scratch=scratch, on_bytes=on_bytes)
    record = scratch / "manifest.json"
    record.write_bytes(manifest.to_json())
    record.replace(target / "manifest.json")
    if not exists:
        target.rename(entry.directory)
    shutil.rmtree(entry.unfinished, ignore_errors=True)


def _is_whole(manifest: Manifest, directory: Path) -> bool:
    """Whether the copy is exactly what the manifest says, all bytes read."""
    try:
        if (directory / "manifest.json").read_bytes() != manifest.to_json():
            return False
        places = list(_places(manifest, directory))
        found = set(_files_below(directory)) if _is_directory(directory) else set[Path]()
        return found == {path for _, path in places} and not find_missing(places)
    except OSError:
        return False


def _places(manifest: Manifest, directory: Path) -> Iterator[Place]:
    for folder, files in (("files", manifest.files), ("logs", manifest.logs)):
        for file in files:
            yield file, directory / folder / file.path


def _files_below(directory: Path) -> Iterator[Path]:
    """Everything in files/ and logs/ that is no directory, links to directories too."""
    for folder in ("files", "logs"):
        if _is_directory(directory / folder):
            yield from files_below(directory / folder)
        else:
            yield directory / folder


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _last_use(entry: _Entry) -> float:
    try:
        return entry.used.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _disk_use(directory: Path) -> int:
    """Bytes of the disk that removing `directory` would free.

    A file that has another name too, as one shared with a store on the same disk, frees nothing,
    so it does not count against the limit; once the store drops it, it does.
    """
    total = 0
    for folder, _, names in os.walk(directory):  # which takes it well that things go meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(folder, name))
                if status.st_nlink == 1:
                    total += status.st_blocks * _BLOCK
    return total


def _drop(entry: _Entry) -> bool:
    """Remove an artifact unless it is in use; whether it was removed.

    It loses its name first, so that a crash in the middle leaves no half of it under that name.
    """
    with contextlib.ExitStack() as stack:
        descriptor = os.open(entry.used, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not _is_at(descriptor, entry.used):
            return False
        leaving = entry.leaving
        with contextlib.suppress(FileNotFoundError):
            entry.directory.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)
        shutil.rmtree(entry.unfinished, ignore_errors=True)
        # Nobody can be inside: whoever fetches holds `used` too, and whoever waits for it sees that
        # the file has gone and makes another.
        entry.lock.unlink(missing_ok=True)
        entry.used.unlink(missing_ok=True)
        return True


def _lock_shared(path: Path) -> int:
    """A descriptor that holds a shared lock on the file which is at `path`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


@contextlib.contextmanager
def _alone(path: Path) -> Generator[None]:
    """One process at a time makes room: two would each drop what one of them had to.

    Another one that takes very long, or hangs, is not waited for: too much room is no harm.
    """
    with path.open("w") as file:
        for _ in range(round(_PATIENCE / _SECONDS_BETWEEN_TRIES)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_SECONDS_BETWEEN_TRIES)
        yield


@contextlib.contextmanager
def _fetching(path: Path, on_bytes: OnBytes) -> Generator[None]:
    """Hold the lock at `path`; while another process fetches the same artifact, wait.

    `on_bytes` is told of no bytes meanwhile: whoever may have to stop does it there.
    """
    while True:
        with file_lock.try_hold(path) as is_held:
            if is_held:
                yield
                return
        on_bytes(0)
        time.sleep(_SECONDS_BETWEEN_TRIES)


@contextlib.contextmanager
def _writing(path: Path) -> Generator[None]:
    """What the operating system refuses is an ArtifactError."""
    try:
        yield
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be written: {(error.strerror or str(error)).lower()}", hint=_HINT
        ) from error
