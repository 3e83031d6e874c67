"""A commit is stopped at each call that reaches a file: SIGKILL, EIO, a full disk.

Whatever happens, a reader finds the artifact whole or none; what was acknowledged is there; the
writer ends in one clear line; and a second attempt finishes with the same digest. The calls are
those that Python makes: what happens within one, test_power_cut.py stops.
"""

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flows.artifacts import publish
from infra.storage.base import ObjectNotFound, OnBytes, Store, ignore_bytes
from infra.storage.local import LocalStore
from nanochat_core.errors import NanochatError
from tests.support.reliability.commit_step import (
    STAGE,
    Writer,
    commit,
    digest_of_toy,
    identity_of,
)
from tests.support.reliability.verdict import find_artifact

HOW = ("killed", "EIO", "ENOSPC")
# They must not fail silently.
DECISIVE = {"fsync", "write", "writelines", "flush", "rename", "replace", "link", "mkdir"}
# What is not asked of the kernel, or cannot fail.
PURE = {"fspath", "fsdecode", "getpid", "urandom", "_exit"}
PURE |= {"fileno", "isatty", "readable", "seekable", "writable"}
MODULES = ("posix", "_io", "fcntl")
CLEAR = re.compile(r"error: [^\n]+\nhint: [^\n]+\n")


def watch_calls(call: Callable[[str], None]) -> None:
    """Call a function before each call of this process that reaches a file."""

    def look(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ not in PURE:
            of = type(function.__self__)
            module = getattr(function, "__module__", None) or of.__module__
            if module in MODULES and of.__name__ not in ("BytesIO", "StringIO"):
                call(function.__name__)

    publish.transfer_each = _one_by_one  # the nth call is always the same one
    threading.setprofile(look)
    sys.setprofile(look)


def _one_by_one(
    function: Callable[[Any, OnBytes], Any],
    items: Sequence[Any],
    *,
    on_bytes: OnBytes = ignore_bytes,
) -> list[Any]:
    return [function(item, on_bytes) for item in items]


def find_calls(make_store: Callable[[], Store], directory: Path) -> list[str]:
    """Return the calls of an undisturbed commit, in their order."""
    notes = directory / "calls"
    with notes.open("wb", buffering=0) as file:

        def watch() -> None:
            watch_calls(lambda name: (os.write(file.fileno(), f"{name}\n".encode()), None)[1])

        writer = Writer(make_store, directory / "undisturbed", range(1), before=watch)
        assert writer.wait() == 0, writer.errors.read_text()
    return notes.read_text().split()


def disturb(make_store: Callable[[], Store], directory: Path, nth: int, how: str) -> list[str]:
    """Disturb the nth call of a commit, from 0; look; commit again. Return the broken promises."""
    scratch = Path(tempfile.mkdtemp(dir=directory))
    fired = scratch / "fired"
    left = nth

    def strike(name: str) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            fired.write_text(name)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(getattr(errno, how), os.strerror(getattr(errno, how)))

    writer = Writer(make_store, scratch, range(1), before=lambda: watch_calls(strike))
    code, said = writer.wait(), writer.errors.read_text()
    call = fired.read_text() if fired.exists() else ""
    store, acknowledged = make_store(), 0 in writer.acknowledged()
    found = find_artifact(store, STAGE, identity_of(0).fingerprint)
    again = ""
    try:
        manifest = commit(store, 0, scratch)
        after = find_artifact(store, STAGE, manifest.fingerprint)
        if (after.state, after.digest) != ("whole", digest_of_toy()):
            again = f"{after}"
    except NanochatError as error:
        again = str(error)
    shutil.rmtree(scratch)
    faults = {
        "torn": found.state == "torn",
        "different": found.digest not in (None, digest_of_toy()),
        "lost": acknowledged and found.state != "whole",
        "unclear": code > 0 and not CLEAR.fullmatch(said),
        "swallowed": code == 0 and how != "killed" and call in DECISIVE,
        "silent": code == 0 and not acknowledged,
        "stuck": bool(again),
        "undisturbed": not call,
    }
    where = f"{how} before call {nth}, {call}: "
    return [where + f"{name} {said} {again}" for name, is_so in faults.items() if is_so]


def stop_commits(
    make_store: Callable[[Path], Store], directory: Path, *, count: int, seed: int
) -> tuple[int, list[str]]:
    """Disturb a commit at `count` points, at most at each; return at how many, and the faults.

    `make_store` makes an empty store from the path of a directory that does not exist.
    """
    calls = find_calls(lambda: make_store(directory / "first"), directory)
    points = [(nth, how) for nth in range(len(calls)) for how in HOW]
    chosen = random.Random(seed).sample(points, min(count, len(points)))
    faults: list[str] = []
    for number, (nth, how) in enumerate(chosen):
        place = directory / f"store-{number}"
        faults += disturb(lambda place=place: make_store(place), directory, nth, how)
        shutil.rmtree(place, ignore_errors=True)
    return len(chosen), faults


class InPlaceStore(LocalStore):
    """What LocalStore protects from: objects get their name before they have their bytes."""

    def put(self, key: str, data: bytes) -> None:
        """See Store."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with self._writing(), path.open("wb", buffering=0) as file:
            for start in range(0, len(data), 512):
                file.write(data[start : start + 512])
            os.fsync(file.fileno())

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        with contextlib.suppress(ObjectNotFound):
            return self.get(key) == data
        self.put(key, data)
        return True
