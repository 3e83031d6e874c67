"""Read text from objects in a bucket of an S3-compatible server.

boto3's transfers download them. Credentials, region and endpoint come from AWS's usual variables
and files, as a store's do.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from nanochat_core.config import ShardsConfig
from nanochat_core.data.hub.transfers import ByteProgress
from nanochat_core.data.text.documents import Document
from nanochat_core.data.text.text_files import choose_text, read_files
from nanochat_core.data.text.text_folder import check_snapshot, snapshot_of
from nanochat_core.errors import ConfigError, DataError
from nanochat_core.runtime.progress import Progress

_DENIED = (401, 403)
_CONNECT_SECONDS = 5  # botocore's 60, five times, would stop a plan for minutes
_ATTEMPTS = 3


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
    names = {_file_of(item, scratch): item for item in objects}
    _download(names, where, ByteProgress(size, progress.message))
    # An object may have been written while others were read.
    check_snapshot(where, _snapshot(list_objects(config.path)), config.snapshot)
    try:
        yield from read_files(list(names), config, progress)
    except DataError as error:
        message = str(error)
        for path, item in names.items():
            message = message.replace(str(path), f"s3://{item.path}")
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
        [item for item in _list(bucket, pattern) if _is_wanted(item.path, wanted)],
        f"s3://{path}",
        path_of=lambda item: item.path,
        size_of=lambda item: item.size,
        log=log,
        named=wanted,
        pattern_of="shards.path",
    )
    return sorted(objects, key=lambda item: item.path)


def _is_wanted(path: str, wanted: str) -> bool:
    """Return whether this is the wanted object or below it, by its very name or as a pattern."""
    below = path.startswith(f"{wanted}/") or fnmatchcase(path, f"{wanted}/*")
    return path == wanted or below or fnmatchcase(path, wanted)


def _list(bucket: str, pattern: str) -> list[S3Object]:
    """Return the objects whose keys begin like the pattern, up to its first wildcard."""
    prefix = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    with _explaining(f"s3://{bucket}/{prefix}".rstrip("/")):
        pages = _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [
            S3Object(
                path=f"{bucket}/{item['Key']}",
                size=item["Size"],
                changed=round(item["LastModified"].timestamp() * 1000) * 1_000_000,
            )
            for page in pages
            for item in page.get("Contents", ())
            if not item["Key"].endswith("/")  # a folder, as some tools write it
        ]


def _snapshot(objects: list[S3Object]) -> tuple[str, ...]:
    return snapshot_of([f"{item.path} {item.size} {item.changed}" for item in objects])


def _client() -> Any:
    # Loaded late: only this source needs it.
    from botocore.config import Config  # pyright: ignore[reportMissingTypeStubs]
    from botocore.session import Session  # pyright: ignore[reportMissingTypeStubs]

    retries = {"mode": "standard", "total_max_attempts": _ATTEMPTS}
    config = Config(connect_timeout=_CONNECT_SECONDS, retries=retries)
    return Session().create_client("s3", config=config)


def _file_of(item: S3Object, folder: Path) -> Path:
    # Files have names of at most 255 bytes, keys longer ones.
    version = hashlib.sha256(f"{item.path} {item.changed}".encode()).hexdigest()[:16]
    return folder / f"{version}-{PurePosixPath(item.path).name[-60:]}"


def _download(names: dict[Path, S3Object], where: str, progress: ByteProgress) -> None:
    """Download the objects to the files of these names, but those that an earlier attempt has."""
    from s3transfer.manager import TransferManager  # pyright: ignore[reportMissingTypeStubs]
    from s3transfer.subscribers import BaseSubscriber  # pyright: ignore[reportMissingTypeStubs]

    class Counter(BaseSubscriber):
        def on_progress(self, future: object, bytes_transferred: int, **_: object) -> None:
            progress.add(bytes_transferred)

    with _explaining(where), TransferManager(_client()) as manager:
        started: list[Any] = []
        for path, item in names.items():
            bucket, _, key = item.path.partition("/")
            if not path.exists():
                started.append(manager.download(bucket, key, str(path), subscribers=[Counter()]))
        for transfer in started:
            transfer.result()


@contextlib.contextmanager
def _explaining(what: str) -> Generator[None]:
    """Turn the client's errors into a DataError with one line and a hint."""
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import (  # pyright: ignore[reportMissingTypeStubs]
        RetriesExceededError,
    )

    try:
        yield
    except ClientError as error:
        answer: Any = error.response
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if answer.get("Error", {}).get("Code") == "NoSuchBucket":
            bucket = "/".join(what.split("/")[:3])
            raise DataError(f"{bucket} does not exist", hint="check bucket and endpoint") from error
        if status in _DENIED:
            raise DataError(
                f"the S3 server refuses {what}",
                hint="check AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            ) from error
        raise _unreadable(what, error) from error
    except RetriesExceededError as error:  # of a body that is cut off each time
        raise _unreadable(what, error.last_exception) from error
    except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is not an address
        raise _unreadable(what, error) from error


def _unreadable(what: str, error: Exception) -> DataError:
    return DataError(
        f"{what} cannot be read: {' '.join(str(error).split())[:200]}",
        hint="check AWS_ENDPOINT_URL, AWS_REGION, the credentials and the network",
    )
