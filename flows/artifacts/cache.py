"""A cache of fetched artifacts: verified at each use, shared by processes, limited in size.

{stage}/{fingerprint}-{record}/          files/, logs/, manifest.json
{stage}/.{fingerprint}-{record}.new/     an unfinished fetch; the next one resumes it
{stage}/{fingerprint}-{record}.used      locked shared by each user; its mtime is the last use
{stage}/{fingerprint}-{record}.lock      locked by the process that fetches

An artifact in use is locked by the kernel, which releases the lock when the process ends, however
it ends. The locks are flock and not the filelock package, which has no shared locks. Their files
are empty and stay: a file that is removed while a process waits for its lock excludes nothing.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from flows.artifacts.transfer import Place, fetch_verified, files_below, find_missing
from flows.identity.manifest import Manifest
from flows.identity.ref import short
from flows.leases import file_lock
from infra.storage.base import OnBytes, Store, ignore_bytes
from infra.storage.files import try_flock, writing
from nanochat_core.errors import ArtifactError

_NAME = re.compile(r"\.?(?P<name>[0-9a-f]{12}-[0-9a-f]{12})(\.new)?")
_FOLDERS = ("files", "logs")
_BLOCK = 512  # bytes; st_blocks counts in these on every file system


class Cache(contextlib.AbstractContextManager["Cache"]):
    """The cached artifacts in `directory`: at most `limit` bytes, not counting those in use.

    An artifact that was returned is in use until the cache is closed or the process ends. Use it as
    a context manager where it does not live as long as the process.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.limit = limit
        self._lock = threading.Lock()
        self._held: dict[Path, int] = {}  # plain descriptors: no garbage collector closes them

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all artifacts that were returned."""
        with self._lock:
            held, self._held = self._held, {}
            for descriptor in held.values():
                with contextlib.suppress(OSError):  # a full disk must not keep it locked
                    os.utime(descriptor)  # used until here
                os.close(descriptor)

    def use(self, manifest: Manifest) -> Path:
        """Return the path of an artifact, in use from now on, whether or not it exists."""
        entry = self._entry(manifest)
        with writing(entry, ArtifactError):
            entry.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                held = self._held.get(entry)
                if held is None:
                    held = self._held[entry] = _open_lock(_used(entry))
                    fcntl.flock(held, fcntl.LOCK_SH)
                os.utime(held)
        return entry

    def make_room(self) -> None:
        """Remove artifacts that are not in use, least recently used first, down to the limit.

        Unfinished fetches too. Raises ArtifactError if the disk refuses.
        """
        # Two processes at once remove the same artifacts, in the same order.
        with writing(self.directory, ArtifactError):
            entries = sorted(self._entries(), key=_last_use)
            sizes = [_disk_use(e) + _disk_use(_unfinished(e)) for e in entries]
            total = sum(sizes)
            for entry, size in zip(entries, sizes, strict=True):
                if total > self.limit and _drop(entry):
                    total -= size

    def _entry(self, manifest: Manifest) -> Path:
        # By the whole manifest: another store's artifact of the same content has another manifest
        # and other logs, which must not replace those that a job is reading.
        record = hashlib.sha256(manifest.to_json()).hexdigest()
        name = f"{short(manifest.fingerprint)}-{short(record)}"
        return self.directory / manifest.stage / name

    def _entries(self) -> Iterator[Path]:
        """Yield the cached artifacts, whole or not. Ignores other files."""
        for stage in filter(Path.is_dir, self.directory.iterdir()):
            found = [_NAME.fullmatch(path.name) for path in stage.iterdir()]
            for name in sorted({match["name"] for match in found if match}):
                yield stage / name


def fetch(
    store: Store, manifest: Manifest, cache: Cache, *, on_bytes: OnBytes = ignore_bytes
) -> Path:
    """Return a local directory with the artifact: files/, logs/, manifest.json, each byte verified.

    A cached copy is verified too; files that are damaged or missing in it are fetched. The
    directory is in use until the cache is closed. Raises ArtifactError, naming the file, if the
    store's own bytes are damaged or gone.
    """
    # In use before anything is fetched: another process that makes room must not remove it.
    directory = cache.use(manifest)
    if not _is_whole(manifest, directory):
        with (
            # While another process fetches it, a caller that is to stop raises in `on_bytes`.
            file_lock.hold(directory.with_name(f"{directory.name}.lock"), lambda: on_bytes(0)),
            writing(directory, ArtifactError),
        ):
            _complete(store, manifest, directory, on_bytes)
        # After the fetch, when the size on disk is known. This artifact is in use and stays.
        cache.make_room()
    return directory


def _complete(store: Store, manifest: Manifest, directory: Path, on_bytes: OnBytes) -> None:
    """Fetch what is missing. A new directory gets its name only once it is complete.

    One that exists is repaired in place: another process may be reading the whole files in it.
    """
    unfinished = _unfinished(directory)
    for path in (directory, unfinished, *(directory / folder for folder in _FOLDERS)):
        if path.is_symlink():  # a person's: where it leads, nothing is ours to remove
            path.unlink()
    exists = directory.exists()
    target = directory if exists else unfinished / "whole"
    for folder in _FOLDERS:
        (target / folder).mkdir(parents=True, exist_ok=True)
    places = list(_places(manifest, target))
    # A stage may read a whole directory, and then any file that the manifest does not name.
    for intruder in set(_files_below(target)) - {path for _, path in places}:
        intruder.unlink()
    missing = find_missing(places)
    for path in (*(path for _, path in missing), target / "manifest.json"):
        shutil.rmtree(path, ignore_errors=True)  # nothing happens unless it is a directory
    scratch = unfinished / "parts"
    fetch_verified(store, manifest, missing, scratch=scratch, on_bytes=on_bytes)
    # Last, and in one step: a directory with a manifest once had all its files.
    record = scratch / "manifest.json"
    record.write_bytes(manifest.to_json())
    record.replace(target / "manifest.json")
    if not exists:
        target.rename(directory)
    shutil.rmtree(unfinished, ignore_errors=True)


def _is_whole(manifest: Manifest, directory: Path) -> bool:
    """Return whether the copy is exactly what the manifest says. Reads all bytes."""
    try:
        if (directory / "manifest.json").read_bytes() != manifest.to_json():
            return False
        places = list(_places(manifest, directory))
        is_exact = set(_files_below(directory)) == {path for _, path in places}
        return is_exact and not find_missing(places)
    except OSError:  # the repair will succeed or say what is wrong
        return False


def _places(manifest: Manifest, directory: Path) -> Iterator[Place]:
    for folder, files in zip(_FOLDERS, (manifest.files, manifest.logs), strict=True):
        for file in files:
            yield file, directory / folder / file.path


def _files_below(directory: Path) -> Iterator[Path]:
    """Yield everything in files/ and logs/ but directories; a link to a directory is yielded."""
    for folder in _FOLDERS:
        yield from files_below(directory / folder)


def _unfinished(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.new")


def _used(entry: Path) -> Path:
    return entry.with_name(f"{entry.name}.used")


def _last_use(entry: Path) -> float:
    try:
        return _used(entry).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _disk_use(directory: Path) -> int:
    """Return the bytes of disk space that a directory takes."""
    total = 0
    for folder, _, names in os.walk(directory):  # ignores directories that vanish meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * _BLOCK
    return total


def _drop(entry: Path) -> bool:
    """Remove an artifact unless it is in use. Returns whether it was removed."""
    descriptor, unfinished = _open_lock(_used(entry)), _unfinished(entry)
    try:
        if not try_flock(descriptor):
            return False
        shutil.rmtree(unfinished, ignore_errors=True)
        # Renamed first: a crash during rmtree must not leave a half under the artifact's name.
        with contextlib.suppress(FileNotFoundError):
            entry.rename(unfinished)
            shutil.rmtree(unfinished, ignore_errors=True)
        return True
    except OSError:  # files of `unfinished` are left, as on NFS while a process has them open
        return False
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
