"""Bringing an artifact's files here: no byte counts before it was compared with the manifest.

Stores and networks hand out wrong bytes as a success: a shortened part, a flipped bit, another
object. What comes out wrong is asked for again, since the damage may have happened on the way; what
stays wrong is an error that names the file and the command that mends it.
"""

import hashlib
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeAlias, TypeVar

from flows.identity.fingerprint import short
from flows.identity.manifest import File, Manifest
from infra.storage.base import BadObject, ObjectNotFound, OnBytes, Store, ignore_bytes
from infra.storage.files import sha256_of
from nanochat_core.errors import ArtifactError

TRIES = 3  # of one file that comes out wrong
_THREADS = 8
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Place: TypeAlias = tuple[File, Path]  # a file and where it belongs on this machine


def find_fault(file: File, path: Path) -> str | None:
    """What is wrong with the local copy of a file, to be said after its name; None: it is whole.

    A link is as good as nothing: what it points at is not ours.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return "is gone"
    if not stat.S_ISREG(status.st_mode):
        return "is not a plain file"
    if status.st_size != file.size:
        return f"has {status.st_size} bytes, its manifest says {file.size}"
    try:
        sha256 = sha256_of(path)
    except OSError as error:  # a bad block
        return f"cannot be read: {(error.strerror or str(error)).lower()}"
    if sha256 != file.sha256:
        return f"has sha256 {short(sha256)}, its manifest says {short(file.sha256)}"
    return None


def files_below(directory: Path) -> Iterator[Path]:
    """Everything below that is no directory; of a link to a directory the link itself."""
    for folder, directories, names in os.walk(directory):
        for name in directories:
            if (path := Path(folder, name)).is_symlink():
                yield path
        yield from (Path(folder, name) for name in names)


def find_missing(places: Iterable[Place]) -> list[Place]:
    """Those that are not whole on this machine, all bytes of the others read."""
    known = list(places)
    faults = transfer_each(lambda place, _: find_fault(*place), known)
    return [place for place, fault in zip(known, faults, strict=True) if fault is not None]


def fetch_verified(
    store: Store,
    manifest: Manifest,
    places: Sequence[Place],
    *,
    scratch: Path,
    cached: Path | None = None,
    private: bool = False,
    on_bytes: OnBytes = ignore_bytes,
) -> None:
    """Put each file where it belongs, in one step and verified, over what is there.

    They pass through `scratch`, a directory on the same disk, where an interrupted transfer is gone
    on with. Files that are whole below `cached` are copied from there. A `private` copy is a
    person's own: writable, and never a hard link of the store's object. Raises ArtifactError when
    the store's own bytes are damaged or gone.
    """

    def fetch_one(place: Place, on_bytes: OnBytes) -> None:
        file, path = place
        staged = scratch / scratch_name(file)
        if cached is not None and _copy_whole(file, cached / file.path, staged):
            on_bytes(file.size)
        elif find_fault(file, staged) is not None:
            fetch_file(store, manifest, file, staged, private=private, on_bytes=on_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(path)

    scratch.mkdir(parents=True, exist_ok=True)
    transfer_each(fetch_one, places, on_bytes=on_bytes)


def fetch_file(
    store: Store,
    manifest: Manifest,
    file: File,
    path: Path,
    *,
    private: bool = False,
    on_bytes: OnBytes = ignore_bytes,
) -> None:
    """Write one file of an artifact to `path`, verified. Raises ArtifactError, StoreError."""
    fault = fetch_or_fault(store, manifest, file, path, private=private, on_bytes=on_bytes)
    if fault is not None:
        raise damaged(store, manifest, file, fault)


def fetch_or_fault(
    store: Store,
    manifest: Manifest,
    file: File,
    path: Path,
    *,
    private: bool = False,
    on_bytes: OnBytes = ignore_bytes,
) -> str | None:
    """Like `fetch_file`, but what is wrong with the store's own object is returned.

    Nothing is at `path` then. Still raises ArtifactError when the damage happens on the way.
    """
    faults: list[str] = []
    for _ in range(TRIES):
        try:
            store.fetch(file.key, path, size=file.size, on_bytes=on_bytes)
        except (ObjectNotFound, BadObject) as error:
            return error.fault
        if private:
            _own(path)
        fault = find_fault(file, path)
        if fault is None:
            return None
        path.unlink(missing_ok=True)  # so that nothing of it is gone on with
        faults.append(fault)
    if len(set(faults)) > 1:
        raise ArtifactError(
            f"{_name_in(store, manifest, file)} came out wrong {TRIES} times, not twice the same: "
            f"it {faults[-1]}",
            hint="the network or a disk on the way damages data; when that is mended: "
            f"`nanochat fetch {manifest.name}`",
        )
    return faults[-1]


def damaged(store: Store, manifest: Manifest, file: File, fault: str) -> ArtifactError:
    """The error for a file whose object in the store is not what the manifest says."""
    return ArtifactError(
        f"{_name_in(store, manifest, file)} {fault}",
        hint="the store's copy is damaged; if another store has a whole one, `nanochat push "
        f"{manifest.name} --verify --to {store.url} --store THE-OTHER` mends it, and `nanochat run "
        f"PROFILE --force {manifest.stage}` builds it again",
    )


def transfer_each(
    function: Callable[[_Item, OnBytes], _Result],
    items: Sequence[_Item],
    *,
    on_bytes: OnBytes = ignore_bytes,
) -> list[_Result]:
    """Results in order. The first call that fails stops the others, and its error is raised.

    Each call is given an `on_bytes` of its own, which is where it is stopped: at the next chunk, so
    that neither an error nor Ctrl-C waits for gigabytes.
    """
    if len(items) == 1:
        return [function(items[0], on_bytes)]
    stop = threading.Event()

    def tell(count: int) -> None:
        if stop.is_set():
            raise _Stopped
        on_bytes(count)

    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(function, item, tell) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise
    return [future.result() for future in futures]


class _Stopped(Exception):
    """Another call failed, or the person has had enough. Nobody sees it."""


def _own(path: Path) -> None:
    if path.stat().st_nlink > 1:
        copy = path.with_name(f"{path.name}.copy")
        shutil.copyfile(path, copy)
        copy.replace(path)
    path.chmod(0o644)


def _copy_whole(file: File, source: Path, target: Path) -> bool:
    """Whether a whole copy of `source` lies at `target` afterwards."""
    try:
        target.unlink(missing_ok=True)
        shutil.copyfile(source, target)
        return find_fault(file, target) is None
    except OSError:  # the store's fetch will say what is wrong with the target
        return False


def scratch_name(file: File) -> str:
    """Of a file on its way: the same each time, so that an interrupted transfer is gone on with."""
    return hashlib.sha256(file.key.encode()).hexdigest()[:32]


def _name_in(store: Store, manifest: Manifest, file: File) -> str:
    return f"{file.path} of {manifest.name} ({store.url}/{file.key})"


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_AHEAD = 4  # items a thread that are asked for before the first result is taken


def in_parallel(
    function: Callable[[_Item], _Result], items: Iterable[_Item], *, threads: int
) -> Iterator[_Result]:
    """Results in order; `items` may be endless. The first error is raised in its turn.

    One thread means the caller's own.
    """
    if threads == 1:
        yield from map(function, items)
        return
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
