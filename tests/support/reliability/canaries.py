"""Looks for secrets where none may be: in files, in a database, on command lines."""

import base64
import contextlib
import stat
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil


def forms_of(secret: str) -> tuple[bytes, ...]:
    """A secret as it is, as part of a URL, and in base64 wherever it begins there."""
    found = {secret.encode(), urllib.parse.quote(secret, safe="").encode()}
    for shift in range(3):  # base64 of the same bytes looks different after one or two others
        coded = base64.b64encode(b"\0" * shift + secret.encode())
        found.add(coded[(0, 2, 3)[shift] : -4])  # without what its neighbours share
    return tuple(found)


def find_in_files(directory: Path, secrets: Mapping[str, str]) -> Iterator[str]:
    """A line for each file that has a secret: which one, where, and who may read it."""
    for path in sorted(p for p in directory.rglob("*") if p.is_file() and not p.is_symlink()):
        for name in find_in_file(path, secrets):
            yield f"{name} in {path.relative_to(directory)} ({stat.filemode(path.stat().st_mode)})"


def find_in_file(path: Path, secrets: Mapping[str, str]) -> list[str]:
    """Names of the secrets that a file has."""
    with contextlib.suppress(FileNotFoundError):
        return find_in_text(path.read_bytes(), secrets)
    return []


def find_in_text(text: bytes, secrets: Mapping[str, str]) -> list[str]:
    """Names of the secrets in it."""
    return [n for n, secret in secrets.items() if any(form in text for form in forms_of(secret))]


@contextlib.contextmanager
def reading_command_lines(secrets: Mapping[str, str]) -> Iterator[tuple[set[str], list[float]]]:
    """Read every process's command line again and again; give what is found, and when it read."""
    found, moments, ended = set[str](), list[float](), threading.Event()

    def read() -> None:
        while not ended.wait(0.2):
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    words = process.cmdline()
                    for name in find_in_text("\0".join(words).encode(errors="replace"), secrets):
                        found.add(f"{name} on the command line of {words[:4]}")
            moments.append(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield found, moments
    finally:
        ended.set()
        thread.join()
