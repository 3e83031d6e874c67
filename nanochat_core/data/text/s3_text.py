"""Read text from objects in a bucket of an S3-compatible server.

pyarrow's own client is used, which takes credentials, region and endpoint from AWS's usual
variables and files.
"""

import contextlib
import errno
import hashlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from nanochat_core.config import ShardsConfig
from nanochat_core.data.hub.transfers import OnBytes, fetch_files
from nanochat_core.data.text.documents import Document
from nanochat_core.data.text.text_files import choose_text, documents_of
from nanochat_core.data.text.text_folder import check_snapshot, snapshot_of
from nanochat_core.errors import ConfigError, DataError
from nanochat_core.runtime.progress import Progress

CHUNK = 16 << 20  # bytes of a request
_NO_BUCKET = ("NO_SUCH_BUCKET", "NoSuchBucket", "PATH_NOT_FOUND", "does not exist")
_CHECK_BUCKET = "check bucket and endpoint"
_DENIED = ("ACCESS_DENIED", "HTTP status 403", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH")


@dataclass(frozen=True, kw_only=True)
class S3Object:
    """An object as the server lists it."""

    path: str  # bucket/key
    size: int  # bytes
    changed: int  # when it was last written, ns since 1970


def documents(config: ShardsConfig, progress: Progress, scratch: Path) -> Iterator[Document]:
    """Download the objects that `config.path` names to `scratch`; yield every document.

    In order of their keys. Raises ConfigError if the path names no bucket, DataError naming what
    cannot be downloaded or read, or if the objects do not match `config.snapshot`, before the
    download or after it.
    """
    where = f"s3://{config.path}"
    objects = list_objects(config.path, log=progress.message)
    check_snapshot(where, _snapshot(objects), config.snapshot)
    size = sum(item.size for item in objects)
    progress.message(f"{where}: {len(objects)} objects, {size / 1e6:,.0f} MB")
    client, folder = _client(), scratch / "objects"
    folder.mkdir(exist_ok=True)

    def fetch(number: int, on_bytes: OnBytes) -> Path:
        return _download(client, objects[number], folder, on_bytes)

    paths = fetch_files(fetch, [item.size for item in objects], progress)
    # An object may have been written while others were read.
    check_snapshot(where, _snapshot(list_objects(config.path)), config.snapshot)
    for path, item in zip(paths, objects, strict=True):
        try:
            yield from documents_of(path, config)
        except DataError as error:
            message = str(error).replace(str(path), f"s3://{item.path}")
            raise DataError(message, hint=error.hint) from error


def s3_snapshot(path: str | None) -> tuple[str, ...]:
    """Return one line that depends on keys, sizes and times of the objects; see `list_objects`."""
    return _snapshot(list_objects(path))


def list_objects(
    path: str | None, *, log: Callable[[str], None] = lambda text: None
) -> list[S3Object]:
    """Return the text among the objects that bucket/key, a prefix or a pattern names, by key.

    `log` gets a line on what is left out. Raises ConfigError if the path names no bucket, DataError
    if the server refuses, has no such bucket, or has no text there.
    """
    bucket, _, pattern = (path or "").rstrip("/").partition("/")
    if not bucket or "*" in bucket or "//" in f"/{pattern}":
        raise ConfigError(
            f"shards.path is '{path or ''}', which names no bucket",
            hint="give bucket/prefix, or bucket/prefix/*.parquet for some of its objects",
        )
    wanted = f"{bucket}/{pattern}".rstrip("/")
    objects = choose_text(
        [
            S3Object(path=info.path, size=info.size, changed=info.mtime_ns)
            for info in _list(bucket, pattern)
            if info.is_file and _is_wanted(info.path, wanted)
        ],
        f"s3://{path}",
        path_of=lambda item: item.path,
        size_of=lambda item: item.size,
        log=log,
        named=wanted,
        path=path,
    )
    return sorted(objects, key=lambda item: item.path)


def _is_wanted(path: str, wanted: str) -> bool:
    """Return whether this is the wanted object or below it, by its very name or as a pattern."""
    below = path.startswith(f"{wanted}/") or fnmatchcase(path, f"{wanted}/*")
    return path == wanted or below or fnmatchcase(path, wanted)


def _list(bucket: str, pattern: str) -> list[Any]:
    """Return pyarrow's FileInfo of the object of this name, else of all below the folder.

    That is the folder before the first wildcard: a server lists by prefix alone.
    """
    from pyarrow import fs  # loaded late: only this source needs it

    parts = itertools.takewhile(lambda part: not set(part) & set("*?["), pattern.split("/"))
    folder = "/".join([bucket, *parts]).rstrip("/")
    client = _client()
    with _translating(f"s3://{folder}"):
        info = client.get_file_info(folder)
        if info.is_file:
            return [info]
        selector = fs.FileSelector(folder, recursive=True, allow_not_found=folder != bucket)
        found = client.get_file_info(selector)
    if not found:
        # A listing of a prefix says nothing of its bucket. Who may list no more than the prefix is
        # refused here, and learns that there is nothing below it.
        with contextlib.suppress(OSError):
            if client.get_file_info(bucket).type == fs.FileType.NotFound:
                raise DataError(f"s3://{bucket} does not exist", hint=_CHECK_BUCKET)
    return found


def _snapshot(objects: list[S3Object]) -> tuple[str, ...]:
    return snapshot_of([f"{item.path} {item.size} {item.changed}" for item in objects])


def _client() -> Any:
    from pyarrow import fs

    # pyarrow itself does not know the first of them, which our store's client prefers.
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next(filter(None, map(os.environ.get, names)), None)
    with _translating("the S3 server"):
        return fs.S3FileSystem(endpoint_override=endpoint)


def _download(client: Any, item: S3Object, folder: Path, on_bytes: OnBytes) -> Path:
    """Download what an earlier attempt has not downloaded of an object; return the file."""
    version = hashlib.sha256(f"{item.path} {item.changed}".encode()).hexdigest()[:16]
    name = PurePosixPath(item.path).name[-60:]  # files have names of at most 255 bytes, keys longer
    path = folder / f"{version}-{name}"
    if path.exists() and path.stat().st_size == item.size:
        on_bytes(item.size)
        return path
    part = path.with_suffix(".part")
    done = part.stat().st_size if part.exists() else 0
    if done > item.size:  # damaged
        part.unlink()
        done = 0
    with (
        _translating(f"s3://{item.path}"),
        client.open_input_file(item.path) as stream,
        part.open("ab") as file,
    ):
        stream.seek(done)
        on_bytes(done)
        while chunk := stream.read(CHUNK):
            file.write(chunk)
            on_bytes(len(chunk))
    if (size := part.stat().st_size) != item.size:
        raise DataError(f"s3://{item.path} has {size} bytes, not {item.size}", hint="run again")
    return part.rename(path)


@contextlib.contextmanager
def _translating(what: str) -> Generator[None]:
    """Turn the client's errors into a DataError with one line and a hint."""
    try:
        yield
    # ArrowInvalid, of a name that S3 cannot have, is a ValueError.
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) not in (None, errno.ENOENT):
            raise  # of a file that cannot be written: the client's own have no number but this
        said = " ".join(str(error).split())
        if any(word in said for word in _NO_BUCKET):
            raise DataError(f"{what} does not exist", hint=_CHECK_BUCKET) from error
        if any(word in said for word in _DENIED):
            raise DataError(
                f"the S3 server refuses {what}",
                hint="check AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            ) from error
        raise DataError(
            f"{what} cannot be read: {said[:200]}",
            hint="check AWS_ENDPOINT_URL, AWS_REGION and the network",
        ) from error
