"""A commit is stopped at each of its system calls: by SIGKILL, by EIO, by a full disk.

strace attaches to a writer of commit_step.py that is ready to commit, and disturbs its nth call of
one kind. Whatever happens, a reader finds the artifact whole or none; what was acknowledged is
there; the writer ends in one clear line; and a second attempt finishes with the same digest.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from nanochat_core.errors import NanochatError
from tests.support.infra.storage.s3_server import S3Server
from tests.support.reliability.commit_step import (
    STAGE,
    Kind,
    Nursery,
    Order,
    commit,
    digest_of_toy,
    identity_of,
    make_toy,
    open_warm,
    read_acknowledged,
)
from tests.support.reliability.verdict import Verdict, find_artifact

DISTURBANCES = {"killed": "signal=SIGKILL", "EIO": "error=EIO", "ENOSPC": "error=ENOSPC"}
BUCKET = "syscalls"
_ALL = "%file,%desc,%network"  # whatever touches a file or the network
_DECISIVE = {"fsync", "write", "rename", "link", "mkdir"}  # must not fail without a word
_MEMORY = {"mmap"}  # strace counts it among them
_CALL = re.compile(r"^\d+ +(\w+)\(.*")
_CLEAR = re.compile(r"error: [^\n]+\nhint: [^\n]+\n")


def why_not() -> str | None:
    """Why system calls cannot be disturbed on this machine."""
    if shutil.which("strace") is None:
        return "there is no strace here"
    command = ["strace", "-e", "inject=openat:error=EIO", "-o", os.devnull, "cat", os.devnull]
    if subprocess.run(command, capture_output=True, check=False).returncode == 0:
        return "strace cannot disturb system calls here"
    return None


needs_strace = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One disturbance of a commit."""

    call: str
    nth: int  # of the calls with this name, from 1
    how: str  # a key of DISTURBANCES


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of it."""

    point: Point
    fired: bool
    code: int  # exit code of the writer, or minus its signal
    said: str  # what it printed
    verdict: Verdict  # what a reader found afterwards
    acknowledged: bool
    again: str | None  # why a second attempt failed; None: it ended well

    @property
    def faults(self) -> Sequence[str]:
        """Promises that were broken."""
        found = {
            "torn": self.verdict.state == "torn",
            "different": self.verdict.digest not in (None, digest_of_toy(0)),
            "lost": self.acknowledged and self.verdict.state != "whole",
            "unclear": self.code > 0 and not _CLEAR.fullmatch(self.said),
            "swallowed": self.fired and self.code == 0 and self.point.call in _DECISIVE,
            "silent": self.code == 0 and not self.acknowledged,
            "stuck": self.again is not None,
        }
        return [name for name, is_so in found.items() if is_so]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where commits are disturbed. Each one goes to a store of its own."""

    directory: Path
    nursery: Nursery
    make_url: Callable[[Path], str]  # from an empty directory
    store: Kind = "as it is"

    def dry_run(self) -> dict[str, int]:
        """How often an undisturbed commit makes each call."""
        order = self._order()
        with _traced(self.nursery.start(order), order, f"trace={_ALL}") as log:
            assert self.nursery.wait() == 0, order.errors.read_text()
        names = [found.group(1) for line in log() if (found := _CALL.match(line))]
        return {call: names.count(call) for call in sorted({*names} - _MEMORY)}

    def disturb(self, point: Point) -> Outcome:
        """Commit once, disturbed at a point; look; commit again."""
        order = self._order()
        inject = f"inject={point.call}:{DISTURBANCES[point.how]}:when={point.nth}"
        pid = self.nursery.start(order)
        with _traced(pid, order, f"trace={point.call}", inject) as log:
            code = self.nursery.wait()
        store = open_warm(order.url)
        found = find_artifact(store, STAGE, identity_of(0).fingerprint)
        again = None
        try:
            manifest = commit(store, make_toy(0, Path(order.scratch)))
            after = find_artifact(store, STAGE, manifest.fingerprint)
            if (after.state, after.digest) != ("whole", digest_of_toy(0)):
                again = f"{after}"
        except NanochatError as error:
            again = str(error)
        outcome = Outcome(
            point=point,
            fired=any("INJECTED" in line or "SIGKILL" in line for line in log()),
            code=code,
            said=order.errors.read_text(),
            verdict=found,
            acknowledged=0 in read_acknowledged(order),
            again=again,
        )
        shutil.rmtree(Path(order.scratch).parent)
        return outcome

    def _order(self) -> Order:
        place = Path(tempfile.mkdtemp(dir=self.directory))
        url = self.make_url(place)
        scratch = str(place / "scratch")
        return Order(url=url, scratch=scratch, first=0, last=0, store=self.store, serial=True)


@contextmanager
def _traced(pid: int, order: Order, *expressions: str) -> Generator[Callable[[], list[str]]]:
    """strace on a writer that begins now; gives a way to read its log, once it has ended."""
    log = Path(order.scratch) / "strace"
    options = [word for expression in expressions for word in ("-e", expression)]
    command = ["strace", "-f", "-qq", "-o", str(log), "-p", str(pid), *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as strace:
        try:
            status = Path(f"/proc/{pid}/status")
            while "TracerPid:\t0\n" in status.read_text():
                assert strace.poll() is None, strace.stderr and strace.stderr.read()
                time.sleep(0.001)
            os.kill(pid, signal.SIGUSR1)
            yield lambda: log.read_text(errors="replace").splitlines()
            strace.wait(120)
        finally:
            strace.kill()


def stop_commits(bench: Bench, *, count: int | None, seed: int) -> list[Outcome]:
    """Disturb a commit at `count` points, or at all of them."""
    chosen = [
        Point(call=call, nth=nth, how=how)
        for call, times in bench.dry_run().items()
        for nth in range(1, times + 1)
        for how in DISTURBANCES
    ]
    if count is not None:
        chosen = random.Random(seed).sample(chosen, count)
    return [bench.disturb(point) for point in chosen]


def check(outcomes: Sequence[Outcome]) -> None:
    """No promise was broken, and nearly all disturbances happened."""
    assert [outcome for outcome in outcomes if outcome.faults] == []
    assert sum(outcome.fired for outcome in outcomes) > 0.8 * len(outcomes)


@contextmanager
def open_bench(
    directory: Path, server: S3Server | None, *, store: Kind = "as it is"
) -> Iterator[Bench]:
    """Commits to a bucket of the server, or else to directories."""
    directory.mkdir(parents=True, exist_ok=True)
    if server is not None:
        server.make_bucket(BUCKET)

    def make_url(place: Path) -> str:
        return f"s3://{BUCKET}/{place.name}" if server else (place / "store").as_uri()

    environment = server.environment if server else {}
    with mock.patch.dict(os.environ, environment), Nursery() as nursery:
        yield Bench(directory=directory, nursery=nursery, make_url=make_url, store=store)


def server_of(kind: str, request: pytest.FixtureRequest) -> S3Server | None:
    """Return the S3 server of the tests, or None for a directory."""
    return request.getfixturevalue("s3_server") if kind == "s3" else None
