"""Download the CORE metric's data, a zip file from the web, and unpack it.

    core/core.yaml            the tasks
    core/eval_meta_data.csv   their baselines
    core/eval_data/           their questions

The zip file is cached next to the Hub client's cache, so that it is downloaded once.
"""

import contextlib
import hashlib
import json
import shutil
import zipfile
import zlib
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
from filelock import FileLock

from nanochat_core.data.hub.errors import PROXY, TRANSIENT, Unreachable, with_retries
from nanochat_core.data.hub.transfers import ByteProgress, Log
from nanochat_core.errors import DataError
from nanochat_core.job import move_into_place, write_json
from nanochat_core.runtime.progress import Progress

NEEDED = ("core.yaml", "eval_meta_data.csv", "eval_data")
MAX_BYTES = 4_000_000_000  # unpacked, ten times the bundle
_TIMEOUT = 30.0
_NO_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError)
_JUNK = ("__MACOSX", ".DS_Store")
_WITHOUT = "without it: --set task_data.core_bundle=null"


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A downloaded bundle: its sha256, and the server's ETag or Last-Modified of that time."""

    sha256: str
    validator: str | None
    when: float  # unix seconds


def fetch_bundle(
    url: str, directory: Path, *, sha256: str | None, scratch: Path, progress: Progress
) -> dict[str, Any]:
    """Download and unpack the bundle into `directory`, atomically; return its description.

    `scratch` is on the same file system. Raises DataError if the bundle cannot be downloaded or
    unpacked, or has another sha256.
    """
    archive = archive_path(url)
    with _archive_lock(archive):
        found = find_archive(url)
        if found is None or sha256 not in (None, found.sha256) or found.sha256 != _digest(archive):
            found = _download(url, archive, sha256, progress.message)
        try:
            files = unpack(archive, directory, scratch=scratch)
        except DataError as error:
            raise DataError(f"{url}: {error}", hint=error.hint) from error
        size = archive.stat().st_size
    progress.message(f"core: {files} files from {url}")
    return {"url": url, "sha256": found.sha256, "bytes": size, "files": files}


def fetch_archive(url: str, *, validator: str | None, log: Log) -> str:
    """Download the bundle unless the cached one has this validator; return its sha256.

    A validator of None matches no file. Raises DataError.
    """
    archive = archive_path(url)
    with _archive_lock(archive):
        found = find_archive(url)
        if found is None or validator is None or found.validator != validator:
            found = _download(url, archive, None, log)
        return found.sha256


def ask_validator(url: str, *, seconds: float) -> str | None:
    """Ask the server, once, for the validator of its file: ETag or Last-Modified.

    Raises Unreachable if there is no answer, DataError if the server has no such file, the address
    is not one or the proxy cannot be used.
    """
    with _explaining(url), httpx.Client(follow_redirects=True) as client:
        answer = client.head(url, timeout=seconds)
        answer.raise_for_status()
        return _validator(answer)


def find_archive(url: str) -> Archive | None:
    """Return what is recorded of an earlier download, None if there is none."""
    path = archive_path(url)
    with contextlib.suppress(OSError, ValueError, TypeError):
        when = path.stat().st_mtime
        return Archive(**json.loads(_record_of(path).read_text(encoding="utf-8")), when=when)
    return None


def _download(url: str, archive: Path, sha256: str | None, log: Log) -> Archive:
    """Download the bundle; it is complete and recorded, or absent. Raises DataError."""
    part = archive.with_name("bundle.part")

    def get() -> tuple[str, str | None]:
        with _explaining(url):
            return _get(url, part, log)

    try:
        digest, validator = with_retries(get)
        if sha256 not in (None, digest):
            log(f"{url} has sha256 {digest[:12]}, expected {sha256}: it is downloaded again")
            digest, validator = with_retries(get)
        if sha256 not in (None, digest):
            raise DataError(
                f"{url} has sha256 {digest[:12]}, expected {str(sha256)[:12]}",
                hint=f"the file there is another one, or damaged in transit; {_WITHOUT}",
            )
        # The record first: a file without one would be downloaded again, a record without its file
        # does no harm.
        archive.unlink(missing_ok=True)
        write_json(_record_of(archive), {"sha256": digest, "validator": validator})
        move_into_place(part, archive)
    finally:
        part.unlink(missing_ok=True)
    return Archive(sha256=digest, validator=validator, when=archive.stat().st_mtime)


def _get(url: str, part: Path, log: Log) -> tuple[str, str | None]:
    """Stream the file at `url` to `part`; return its sha256 and validator."""
    digest = hashlib.sha256()
    with (
        httpx.Client(timeout=_TIMEOUT, follow_redirects=True) as client,
        client.stream("GET", url) as answer,
        part.open("wb") as file,
    ):
        answer.raise_for_status()
        length = answer.headers.get("Content-Length", "")
        progress = ByteProgress(int(length) if length.isdigit() else None, log)
        for chunk in answer.iter_bytes():
            file.write(chunk)
            digest.update(chunk)
            progress.add(len(chunk))
        return digest.hexdigest(), _validator(answer)


@contextlib.contextmanager
def _explaining(url: str) -> Generator[None]:
    """Raise DataError that says why `url` cannot be downloaded, Unreachable if a retry may help."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, ValueError, OSError) as error:
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        is_lost = isinstance(error, httpx.TransportError) and not isinstance(
            error, httpx.UnsupportedProtocol
        )
        why = f"the server answers {status}" if status else str(error) or type(error).__name__
        raise (Unreachable if is_lost or status in TRANSIENT else DataError)(
            f"{url} cannot be downloaded: {why}",
            hint=f"check the address, the network, {PROXY}, and the space in HF_HOME; {_WITHOUT}",
        ) from error


def _validator(answer: httpx.Response) -> str | None:
    """Return a value that identifies the server's version of the file: ETag or Last-Modified."""
    # A weak ETag (W/) does not guarantee equal bytes.
    tag = answer.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified")


def _record_of(archive: Path) -> Path:
    return archive.with_name(f"{archive.name}.json")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _archive_lock(archive: Path) -> FileLock:
    # Another job on this machine may download the same bundle.
    archive.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(archive.with_name("lock"))


def unpack(archive: Path, directory: Path, *, scratch: Path) -> int:
    """Unpack into `directory`, without a common top folder; return the number of files.

    Raises DataError for an archive that is damaged, encrypted, too large or no bundle, or has names
    that are repeated or lead out of it; `directory` is then unchanged.
    """
    target = scratch / "bundle"
    shutil.rmtree(target, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as bundle:
            files = [e for e in bundle.infolist() if not (e.is_dir() or _is_junk(e))]
            size = sum(entry.file_size for entry in files)
            if size > MAX_BYTES:
                raise DataError(
                    f"the archive unpacks to {size:,} bytes, at most {MAX_BYTES:,} may",
                    hint=f"check the address; {_WITHOUT}",
                )
            _check_names([entry.filename for entry in files])
            # Python's zipfile writes a link as a plain file, and of no entry more than the size
            # that was summed.
            bundle.extractall(target, files)
    # RuntimeError: it needs a password.
    except (*_NO_ARCHIVE, NotImplementedError, RuntimeError, OSError) as error:
        raise DataError(
            f"the archive cannot be unpacked: {error}", hint=f"remove {archive} and run again"
        ) from error
    folders = [path.parent for path in target.glob(f"*/{NEEDED[0]}")]
    root = folders[0] if len(folders) == 1 and not (target / NEEDED[0]).exists() else target
    if missing := [name for name in NEEDED if not (root / name).exists()]:
        raise DataError(
            f"the archive has no {missing[0]}", hint=f"it should hold {', '.join(NEEDED)}"
        )
    # Complete and checked: only now replace what an earlier attempt may have left.
    shutil.rmtree(directory, ignore_errors=True)
    root.replace(directory)
    shutil.rmtree(target, ignore_errors=True)
    return len(files)


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


def _check_names(names: list[str]) -> None:
    """Raise DataError if zipfile would write one file over another, or under another name."""
    for path, count in Counter(map(PurePosixPath, names)).items():
        is_outside = path.is_absolute() or ".." in path.parts
        if is_outside or count > 1:
            why = "outside of it" if is_outside else f"{count} times"
            raise DataError(
                f"the archive has {str(path)!r} {why}", hint=f"make it again; {_WITHOUT}"
            )


def _is_junk(entry: zipfile.ZipInfo) -> bool:
    return any(part in _JUNK for part in entry.filename.split("/"))
