"""Fetch an artifact's files and verify each byte against the manifest before it is used.

Stores and networks report success for wrong bytes: a shortened part, a flipped bit, another object.
A file that is wrong is fetched again, since the damage may have happened on the way. One that stays
wrong is an error that names the file and the command that repairs it.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from flows.identity.manifest import File, Manifest
from flows.identity.ref import short
from infra.parallel import THREADS, in_parallel
from infra.retry import TRIES
from infra.storage.base import BadObject, ObjectNotFound, OnBytes, Store, ignore_bytes
from infra.storage.files import sha256_of
from nanochat_core.errors import ArtifactError, reason_of

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

Place: TypeAlias = tuple[File, Path]  # a file and its path on this machine
# Called with the number of bytes to come; what it yields is called with each chunk's size.
Watch: TypeAlias = Callable[[int], contextlib.AbstractContextManager[OnBytes]]


def watch_nothing(total: int) -> contextlib.AbstractContextManager[OnBytes]:
    """Return an `on_bytes` that reports no progress."""
    return contextlib.nullcontext(ignore_bytes)


def find_fault(file: File, path: Path) -> str | None:
    """Return what is wrong with the local copy of a file, as a predicate. None means whole."""
    try:
        status = path.lstat()  # not stat: what a link points to is not ours
    except (FileNotFoundError, NotADirectoryError):
        return "is gone"
    if not stat.S_ISREG(status.st_mode):
        return "is not a plain file"
    # The size first: it costs no read, and finds most damage.
    if status.st_size != file.size:
        return f"has {status.st_size} bytes, its manifest says {file.size}"
    try:
        sha256 = sha256_of(path)
    except OSError as error:  # a bad block
        return f"cannot be read: {reason_of(error)}"
    if sha256 != file.sha256:
        return f"has sha256 {short(sha256)}, its manifest says {short(file.sha256)}"
    return None


def read_file(store: Store, manifest: Manifest, name: str) -> bytes | None:
    """Return the bytes of a small file or log of an artifact, verified. None means it has none.

    Raises ArtifactError if it is gone or damaged.
    """
    file = next((f for f in (*manifest.files, *manifest.logs) if f.path == name), None)
    if file is None:
        return None
    where = f"{name} of {manifest.name}"
    try:
        data = store.get(file.key, size=file.size)
    except ObjectNotFound as error:
        raise ArtifactError(f"{where} is gone from {store.url}") from error
    except BadObject as error:
        raise ArtifactError(f"{where} {error.fault}", hint=error.hint) from error
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ArtifactError(f"{where} is damaged: its bytes are not those of the manifest")
    return data


def files_below(directory: Path) -> Iterator[Path]:
    """Yield everything below but directories; of a link to a directory the link itself.

    Raises OSError: a directory that cannot be read must not look empty.
    """

    def fail(error: OSError) -> None:
        raise error

    for folder, directories, names in os.walk(directory, onerror=fail):
        for name in directories:
            if (path := Path(folder, name)).is_symlink():
                yield path
        yield from (Path(folder, name) for name in names)


def find_missing(places: Iterable[Place]) -> list[Place]:
    """Return the files that are not whole on this machine. Reads all bytes of the others."""
    known = list(places)
    faults = transfer_each(lambda place, _: find_fault(*place), known)
    return [place for place, fault in zip(known, faults, strict=True) if fault is not None]


def find_sizes(store: Store, files: Iterable[File]) -> list[int | None]:
    """Return the size of each file's object, in order; None if it is gone."""

    def find_size(file: File) -> int | None:
        with contextlib.suppress(ObjectNotFound):
            return store.head(file.key).size
        return None

    return list(in_parallel(find_size, files))


def fetch_verified(
    store: Store,
    manifest: Manifest,
    places: Sequence[Place],
    *,
    scratch: Path,
    private: bool = False,
    on_bytes: OnBytes = ignore_bytes,
) -> None:
    """Put each file at its path, verified, in one step, replacing what is there.

    Files pass through `scratch`, a directory on the same disk, from which an interrupted transfer
    is resumed. A `private` copy is writable and never a hard link of the store's object. Raises
    ArtifactError if the store's own bytes are damaged or gone.
    """

    hint = repair_of(store, manifest)

    def fetch_one(place: Place, on_bytes: OnBytes) -> None:
        file, path = place
        staged = scratch / scratch_name(file)
        if private and staged.exists():  # of a transfer that died before it made the file its own
            _own(staged)
        if find_fault(file, staged) is not None:  # else an earlier transfer has left it whole
            fetch_file(
                store, file, staged, of=manifest.name, hint=hint, private=private, on_bytes=on_bytes
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(path)  # in one step: a process that reads the old file keeps it

    scratch.mkdir(parents=True, exist_ok=True)
    for leftover in scratch.glob(".*.part*"):  # of a process that was killed
        leftover.unlink()
    transfer_each(fetch_one, places, on_bytes=on_bytes)


def fetch_file(
    store: Store,
    file: File,
    path: Path,
    *,
    of: str,
    hint: str | None = None,
    private: bool = False,
    on_bytes: OnBytes = ignore_bytes,
) -> None:
    """Fetch one file to `path`, verified. `of` is what it belongs to, for errors.

    Raises StoreError, and ArtifactError: with `hint` if the store's own object is wrong, with
    another one if the damage happens on the way. Then `path` does not exist.
    """
    name = f"{file.path} of {of} ({store.url}/{file.key})"
    faults: list[str] = []
    for _ in range(TRIES):
        try:
            store.fetch(file.key, path, size=file.size, on_bytes=on_bytes)
        except (ObjectNotFound, BadObject) as error:
            raise ArtifactError(f"{name} {error.fault}", hint=hint) from error
        if private:
            _own(path)
        fault = find_fault(file, path)
        if fault is None:
            return
        path.unlink(missing_ok=True)  # or the next try could resume the damaged file
        faults.append(fault)
    # A damaged object gives the same wrong bytes each time; a damaged path gives others.
    if len(set(faults)) > 1:
        raise ArtifactError(
            f"{name} came out wrong {TRIES} times, not twice the same: it {faults[-1]}",
            hint="the network or a disk on the way damages data; when that is mended, run the same "
            "command again",
        )
    raise ArtifactError(f"{name} {faults[-1]}", hint=hint)


def repair_of(store: Store, manifest: Manifest) -> str:
    """Return the hint for a file whose object in the store is not what the manifest says."""
    return (
        "the store's copy is damaged; if another store has a whole one, remove that object, and "
        f"`nanochat push {manifest.name} --to {store.url} --store THE-OTHER` sends it; `nanochat "
        f"run PROFILE --force {manifest.stage}` builds another artifact; move tags to its run"
    )


def transfer_each(
    function: Callable[[_Item, OnBytes], _Result],
    items: Sequence[_Item],
    *,
    on_bytes: OnBytes = ignore_bytes,
) -> list[_Result]:
    """Call `function` on each item in threads and return the results in order.

    The first call that fails stops the others, and its error is raised.
    """
    stop = threading.Event()
    errors: list[BaseException] = []

    def count_or_stop(count: int) -> None:
        # Python cannot end a thread from outside. This is called at each chunk, so neither an error
        # nor Ctrl-C waits for gigabytes.
        if stop.is_set():
            raise _Stopped
        on_bytes(count)

    def call(item: _Item) -> _Result:
        if stop.is_set():  # it waited in the queue meanwhile
            raise _Stopped
        try:
            return function(item, count_or_stop)
        except BaseException as error:
            errors.append(error)
            stop.set()
            raise

    # One item in this thread: the simulation's histories have no other.
    threads = THREADS if len(items) > 1 else 1
    try:
        return list(in_parallel(call, items, threads=threads, end=stop.set))
    except _Stopped:
        raise errors[0] from None


class _Stopped(Exception):
    """Another call failed, or the person pressed Ctrl-C. Never leaves `transfer_each`."""


def _own(path: Path) -> None:
    """Make a fetched file writable, and independent of the store's object."""
    # A local store may fetch by hard link: a write to that would change the store's object.
    if path.stat().st_nlink > 1:
        copy = path.with_name(f"{path.name}.copy")
        shutil.copyfile(path, copy)
        copy.replace(path)
    path.chmod(0o644)


def scratch_name(file: File) -> str:
    """Return a file's name in the scratch directory: the same each time, so transfers resume."""
    # With the path: equal files of one artifact may share an object, and are fetched side by side.
    return hashlib.sha256(f"{file.key}\0{file.path}".encode()).hexdigest()[:32]
