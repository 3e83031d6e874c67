"""Download one file from a web address: resumable, complete or absent, with its sha256."""

import contextlib
import hashlib
import json
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from nanochat_core.data.hub.errors import PROXY, retry_after
from nanochat_core.data.hub.transfers import ByteProgress
from nanochat_core.errors import DataError, reason_of
from nanochat_core.job import move_into_place, write_json

WAITS = (1.0, 4.0, 15.0)  # seconds before a retry; from the start after an attempt with progress
_TIMEOUT = httpx.Timeout(30.0)
# Redirects without an end, or to what is no address.
_WRONG = (httpx.TooManyRedirects, httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError)
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class _TryAgain(Exception):
    """A transient failure; `wait` is the server's Retry-After in seconds."""

    def __init__(self, why: str, *, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


def download_file(url: str, path: Path, *, sha256: str | None, log: Callable[[str], None]) -> str:
    """Download `url` to `path` unless it is there; return its sha256.

    A partial download stays beside `path`, and the next call resumes it if the server still has the
    same file. A file with another sha256 than the given one is downloaded once more. Raises
    DataError if it cannot be downloaded, or is not the expected one.
    """
    _check_address(url)
    found = _find_whole(path, sha256)
    if found is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    digest = ""
    for _ in range(2):
        _complete(url, part, log)
        digest = _digest(part)
        if sha256 in (None, digest):
            # The record first: a file without one would be downloaded again, a record without its
            # file does no harm.
            validator, _ = _read_mark(_record_of(part))
            write_json(_record_of(path), {"sha256": digest, "validator": validator})
            move_into_place(part, path)
            return digest
        part.unlink()
    raise DataError(
        f"{url} has sha256 {digest[:12]}, expected {str(sha256)[:12]}",
        hint="the file there is another one, or damaged in transit",
    )


def ask_validator(url: str, *, seconds: float) -> str | None:
    """Ask the server, once, for the validator of its file: ETag or Last-Modified.

    Raises ConnectionError if there is no answer, DataError if the server has no such file, the
    address is none or the proxy cannot be used.
    """
    _check_address(url)
    try:
        with _open_client() as client:
            answer = client.head(url, timeout=seconds)
    except _WRONG as error:
        raise _wrong_address(url, error) from error
    except httpx.HTTPError as error:
        raise ConnectionError(f"no answer: {str(error) or type(error).__name__}") from error
    if answer.status_code in _TRANSIENT:
        raise ConnectionError(f"the server answers {answer.status_code}")
    if not answer.is_success:
        raise DataError(
            f"{url} cannot be downloaded: the server answers {answer.status_code}",
            hint="is the address right? Without it: --set task_data.core_bundle=null",
        )
    return _validator(answer)


def downloaded_validator(path: Path) -> str | None:
    """Return the validator of the file that was downloaded to `path`, None if unknown."""
    return _read_tree(_record_of(path)).get("validator")


def find_recorded(path: Path) -> str | None:
    """Return the sha256 of the file that was downloaded to `path`, None if there is none."""
    tree = _read_tree(_record_of(path))
    return str(tree["sha256"]) if "sha256" in tree and path.is_file() else None


def _check_address(url: str) -> None:
    """Raise DataError for a URL to which no HTTP request can be made."""
    try:
        parts = httpx.URL(url)
        parts.raw_host.decode().encode("idna")  # as a connection does
        is_address = parts.scheme in ("http", "https") and parts.host
    except (httpx.InvalidURL, UnicodeError):
        is_address = False
    if not is_address:
        raise DataError(f"{url} is no address of a file", hint="it begins with https://")


def _open_client() -> httpx.Client:
    try:
        return httpx.Client(timeout=_TIMEOUT, follow_redirects=True)
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        raise DataError(f"no request can be sent: {error}", hint=f"check {PROXY}") from error


def _wrong_address(url: str, error: Exception) -> DataError:
    return DataError(f"{url} cannot be downloaded: {error}", hint="is the address right?")


def _find_whole(path: Path, sha256: str | None) -> str | None:
    """Return the sha256 of the file at `path` if it is intact and the wanted one, else None."""
    recorded = find_recorded(path)
    with contextlib.suppress(OSError):
        if recorded is not None and recorded == _digest(path) and sha256 in (None, recorded):
            return recorded
    return None


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _complete(url: str, part: Path, log: Callable[[str], None]) -> None:
    """Download until the file is complete, retrying transient failures. Raises DataError."""
    failures = 0
    with _open_client() as client:
        while True:
            before = _size(part)
            try:
                return _fetch_rest(client, url, part, log)
            except _WRONG as error:
                raise _wrong_address(url, error) from error
            except (_TryAgain, httpx.TransportError) as error:
                # Only failures without progress count, so a slow line cannot exhaust the retries.
                failures = 1 if _size(part) > before else failures + 1
                if failures > len(WAITS):
                    raise DataError(
                        f"{url} cannot be downloaded: {str(error) or type(error).__name__}",
                        hint="the partial download is stored: run again to resume it",
                    ) from error
                asked = error.wait if isinstance(error, _TryAgain) else 0.0
                time.sleep(max(asked, WAITS[failures - 1]))
            except OSError as error:  # a full disk
                raise DataError(
                    f"{part} cannot be written: {reason_of(error)}",
                    hint="set HF_HOME to a directory on a disk with space",
                ) from error


def _fetch_rest(client: httpx.Client, url: str, part: Path, log: Callable[[str], None]) -> None:
    """Request the missing bytes once. Raises DataError if a retry cannot help, else _TryAgain."""
    mark = _record_of(part)
    start, (validator, expected) = _size(part), _read_mark(mark)
    if start and start == expected:
        return
    # Ranges count the bytes that are sent: compressed ones could not be appended.
    headers = {"Accept-Encoding": "identity"}
    if start and validator:
        # If-Range: with another file the server answers 200 and sends all of it.
        headers |= {"Range": f"bytes={start}-", "If-Range": validator}
    with client.stream("GET", url, headers=headers) as answer:
        if answer.status_code not in (200, 206, 416):
            _refuse(url, answer)
        total = _total(answer, start)
        # 416: the server's file is shorter than the part. 206 from a server that ignores If-Range:
        # another total or validator shows that it is another file.
        is_same = total == expected and _validator(answer) in (validator, None)
        if answer.status_code == 416 or (answer.status_code == 206 and not is_same):
            part.unlink(missing_ok=True)
            raise _TryAgain("the file there is another one than before")
        if answer.status_code == 200:
            start = 0
            # Before the bytes, so that a partial file always has the validator to resume with.
            write_json(mark, {"validator": _validator(answer), "size": total})
        with part.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            progress = ByteProgress(total, log, done=start)
            for chunk in answer.iter_raw():
                file.write(chunk)
                progress.add(len(chunk))
                progress.log_sometimes()
    if total is not None and _size(part) != total:
        raise _TryAgain(f"it ended after {_size(part):,} of {total:,} bytes")


def _total(answer: httpx.Response, start: int) -> int | None:
    """Return the size of the whole file, None if unknown. Raises _TryAgain for another range."""
    if answer.status_code != 206:
        length = answer.headers.get("Content-Length", "")
        return int(length) if length.isdigit() else None
    place, _, total = answer.headers.get("Content-Range", "").partition("/")
    if place.partition("-")[0] != f"bytes {start}":
        raise _TryAgain(f"the server sent {place or 'no range'}, not the bytes from {start}")
    return int(total) if total.isdigit() else None


def _refuse(url: str, answer: httpx.Response) -> None:
    said = f"the server answers {answer.status_code} {answer.reason_phrase}".rstrip()
    if answer.status_code in _TRANSIENT:
        raise _TryAgain(said, wait=retry_after(answer.headers) or 0.0)
    raise DataError(f"{url} cannot be downloaded: {said}", hint="is the address right?")


def _validator(answer: httpx.Response) -> str | None:
    """Return a value that identifies the server's version of the file: ETag or Last-Modified."""
    # A weak ETag (W/) does not guarantee equal bytes.
    tag = answer.headers.get("ETag", "")
    return tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified")


def _read_mark(mark: Path) -> tuple[str | None, int | None]:
    """Return the validator and the size of the file behind a partial download, None if unknown."""
    tree = _read_tree(mark)
    return tree.get("validator"), tree.get("size")


def _read_tree(path: Path) -> dict[str, Any]:
    """Return a JSON object of ours; an empty one if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        tree: Any = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(tree, dict):
            return typing.cast(dict[str, Any], tree)
    return {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
