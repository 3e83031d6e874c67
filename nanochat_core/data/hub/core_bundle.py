"""Download the CORE metric's data, a zip file from the web, and unpack it as untrusted input.

    core/core.yaml            the tasks
    core/eval_meta_data.csv   their baselines
    core/eval_data/           their questions

The zip file is cached beside the Hub client's cache, so that it is downloaded once.
"""

import hashlib
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock

from nanochat_core.data.hub.web_file import download_file, downloaded_validator
from nanochat_core.errors import DataError, NanochatError
from nanochat_core.runtime.progress import Progress

NEEDED = ("core.yaml", "eval_meta_data.csv", "eval_data")
MAX_FILES = 10_000
MAX_BYTES = 4_000_000_000  # unpacked, ten times the bundle
_JUNK = ("__MACOSX", ".DS_Store")
_CHUNK = 1 << 20


def fetch_bundle(
    url: str, directory: Path, *, sha256: str | None, scratch: Path, progress: Progress
) -> dict[str, Any]:
    """Download and unpack the bundle into `directory`, atomically; return its description.

    `scratch` is on the same file system. Raises DataError if the bundle cannot be downloaded, has
    another sha256, or contains what such a bundle must not.
    """
    # Another job on this machine may download the same bundle.
    archive = archive_path(url)
    with _archive_lock(archive):
        digest = _download(url, archive, sha256, progress.message)
        try:
            files = unpack(archive, directory, scratch=scratch)
        except DataError as error:
            raise DataError(f"{url}: {error}", hint=error.hint) from error
        size = archive.stat().st_size
    progress.message(f"core: {files} files from {url}")
    return {"url": url, "sha256": digest, "bytes": size, "files": files}


def fetch_archive(url: str, *, validator: str | None, log: Callable[[str], None]) -> str:
    """Download the bundle unless the cached one has this validator; return its sha256.

    A validator of None matches no file. Raises DataError.
    """
    archive = archive_path(url)
    with _archive_lock(archive):
        if validator is None or downloaded_validator(archive) != validator:
            archive.unlink(missing_ok=True)
        return _download(url, archive, None, log)


def _download(url: str, archive: Path, sha256: str | None, log: Callable[[str], None]) -> str:
    try:
        return download_file(url, archive, sha256=sha256, log=log)
    except DataError as error:
        raise DataError(
            str(error), hint=f"{error.hint}; without it: --set task_data.core_bundle=null"
        ) from error


def _archive_lock(archive: Path) -> FileLock:
    archive.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(archive.with_name("lock"))


def unpack(archive: Path, directory: Path, *, scratch: Path) -> int:
    """Unpack into `directory`, without a common top folder; return the number of files.

    Raises DataError for names outside the folder, links, encrypted files, too many or too large
    files, and a damaged archive; `directory` is then unchanged.
    """
    target = scratch / "bundle"
    shutil.rmtree(target, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as bundle:
            entries = _check(bundle.infolist())
            root = _common_root(entries)
            room = MAX_BYTES
            for entry in entries:
                place = target / PurePosixPath(entry.filename).relative_to(root)
                place.parent.mkdir(parents=True, exist_ok=True)
                room -= _extract(bundle, entry, place, room)
    except NanochatError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError) as error:
        raise DataError(
            f"the archive cannot be unpacked: {error}", hint=f"remove {archive} and run again"
        ) from error
    if missing := [name for name in NEEDED if not (target / name).exists()]:
        raise DataError(
            f"the archive has no {missing[0]}", hint=f"it should hold {', '.join(NEEDED)}"
        )
    # Complete and checked: only now replace what an earlier attempt may have left.
    shutil.rmtree(directory, ignore_errors=True)
    target.replace(directory)
    return len(entries)


def archive_path(url: str) -> Path:
    """Return the bundle's path in the cache; it may not exist."""
    from huggingface_hub import cached_assets_path, constants

    folder = cached_assets_path(
        "nanochat-flows",
        namespace="bundles",
        subfolder=hashlib.sha256(url.encode()).hexdigest()[:16],
        assets_dir=constants.HF_ASSETS_CACHE,
    )
    return folder / "bundle.zip"


def _check(entries: Sequence[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    """Return the entries that are files. Raises DataError for what must not be unpacked."""
    # Before anything is written: an archive is unpacked completely or not at all.
    files = [e for e in entries if not e.is_dir() and not _is_junk(e)]
    for entry in entries:
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if _leads_elsewhere(entry.filename):
            raise DataError(f"the archive has a file {entry.filename!r} outside of its folder")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise DataError(f"the archive has {entry.filename!r}, which is no plain file")
        if entry.flag_bits & 1:
            raise DataError(f"the archive has {entry.filename!r}, which needs a password")
    names = {entry.filename for entry in files}
    if len(names) < len(files):
        raise DataError("the archive has two files of one name")
    if len(files) > MAX_FILES or sum(entry.file_size for entry in files) > MAX_BYTES:
        raise DataError(
            f"the archive has {len(files):,} files of {sum(e.file_size for e in files):,} bytes, "
            f"at most {MAX_FILES:,} of {MAX_BYTES:,} are unpacked"
        )
    return files


def _leads_elsewhere(name: str) -> bool:
    parts = name.split("/")
    # Backslashes and drive letters ("c:") matter to Windows only, and no such bundle needs them.
    return name.startswith("/") or ".." in parts or "\\" in name or ":" in parts[0]


def _is_junk(entry: zipfile.ZipInfo) -> bool:
    return any(part in _JUNK for part in entry.filename.split("/"))


def _common_root(entries: Sequence[zipfile.ZipInfo]) -> PurePosixPath:
    """Return the folder that contains all entries, or the empty path."""
    roots = {PurePosixPath(entry.filename).parts[0] for entry in entries}
    nested = all("/" in entry.filename for entry in entries)
    return PurePosixPath(roots.pop()) if len(roots) == 1 and nested else PurePosixPath()


def _extract(bundle: zipfile.ZipFile, entry: zipfile.ZipInfo, place: Path, room: int) -> int:
    """Unpack one file of at most `room` bytes; return its size."""
    # Counted while it is read: the size in the archive's directory may be a lie.
    size = 0
    with bundle.open(entry) as source, place.open("xb") as file:
        while chunk := source.read(_CHUNK):
            size += len(chunk)
            if size > room:
                raise DataError(f"the archive has more than {MAX_BYTES:,} bytes")
            file.write(chunk)
    return size
