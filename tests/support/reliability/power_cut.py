"""The machine loses power while artifacts are committed: what was acknowledged is there, whole.

A killed process proves nothing about fsync, because the kernel still writes what it took. Here the
store is on an ext4 image of its own, mounted through a loop device. A cut is ext4's "shutdown
without flushing the log": from that moment nothing more reaches the image, neither pages nor the
journal, and what the kernel still had in memory is dropped. Then the image is mounted again, which
replays the journal, as after a real cut. What it cannot show is a disk that lies about its flushes.

Needs root, and Linux with loop devices.
"""

import contextlib
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from infra.storage.local import LocalStore
from tests.support.flows.waiting import wait_until
from tests.support.reliability.commit_step import STAGE, Writer, digest_of_toy, identity_of
from tests.support.reliability.verdict import find_artifact

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_FLUSHING = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH
_IMAGE = 96 << 20  # bytes
_CUTS_OF_AN_IMAGE = 25
_SECONDS_HELD = 60.0  # a disk, by another process's copy of its mount
_PATIENCE = 2.0  # seconds until the first commit
_LONGEST = 0.12  # seconds until a cut: some ten commits


def why_not() -> str | None:
    """Why there can be no power cut on this machine."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root can mount an image"
    if missing := [tool for tool in ("losetup", "mkfs.ext4", "mount") if not shutil.which(tool)]:
        return f"there is no {missing[0]} here"
    if subprocess.run(["losetup", "--find"], capture_output=True, check=False).returncode:
        return "there is no free loop device"
    return None


needs_power = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@dataclass(kw_only=True)
class Report:
    """What was found: how many commits were acknowledged, and a line for each fault.

    "lost": acknowledged, and not there after a cut. "torn": to be seen after a cut, and not whole.
    "different": there with another digest. "unclear": a writer ended with a traceback. "stuck": an
    undisturbed writer could not commit on the disk afterwards.
    """

    acknowledged: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Disk:
    """An ext4 image that can lose power."""

    device: str
    mounted: Path

    def mount(self) -> None:
        """As a machine does when it starts: the journal is replayed.

        A sandbox that another test has started at that moment has a copy of every mount. As long as
        it lives, mounting gives the disk that lost power once more.
        """
        deadline = time.monotonic() + _SECONDS_HELD
        while True:
            _run("mount", "-t", "ext4", "-o", "noatime", self.device, str(self.mounted))
            try:
                (self.mounted / "has power").touch()
            except OSError:
                self.unmount()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def unmount(self) -> None:
        """Wait until no process uses it."""
        _run("umount", str(self.mounted))

    def cut(self) -> None:
        """From here on nothing is written."""
        descriptor = os.open(self.mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSHING))
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def make_disk() -> Generator[Disk]:
    """A fresh disk, not mounted; nothing of it is left afterwards."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # flushes cost nothing there
    with tempfile.TemporaryDirectory(prefix="power-cut-", dir=memory) as directory:
        image, mounted = Path(directory) / "image", Path(directory) / "mounted"
        mounted.mkdir()
        with image.open("wb") as file:
            file.truncate(_IMAGE)
        _run("mkfs.ext4", "-q", "-F", str(image))
        device = _run("losetup", "--find", "--show", str(image)).strip()
        try:
            yield Disk(device, mounted)
        finally:
            if mounted.is_mount():
                _run("umount", "--lazy", str(mounted))
            _run("losetup", "--detach", device)


def cut_power(*, cuts: int, seed: int, before: Callable[[], object] = lambda: None) -> Report:
    """Cut the power at random moments, several times a disk; writers call `before` first."""
    chance, report = random.Random(seed), Report()
    for first in range(0, cuts, _CUTS_OF_AN_IMAGE):
        with make_disk() as disk:
            numbers = range(first, min(first + _CUTS_OF_AN_IMAGE, cuts))
            _wear_out(disk, report, chance, numbers, before)
    return report


def _wear_out(
    disk: Disk,
    report: Report,
    chance: random.Random,
    cuts: range,
    before: Callable[[], object],
) -> None:
    """Commit without an end on a disk whose power is cut again and again."""
    there: set[int] = set()  # numbers of what must be on the disk
    spoilt: set[int] = set()  # that were reported
    store = LocalStore(disk.mounted / "store")
    start = partial(Writer, lambda: store, disk.mounted.with_name("scratch"))
    for cut in cuts:
        disk.mount()
        following = max(there | spoilt, default=-1) + 1
        writer = start(range(following, 10**9), before=before)
        if chance.random() < 0.5:  # a slow machine would always be cut before the first one
            with contextlib.suppress(AssertionError):  # nor can one commit on a damaged disk
                wait_until(writer.acknowledged, seconds=_PATIENCE, every=0.005)
        time.sleep(chance.uniform(0.0, _LONGEST))
        disk.cut()
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        disk.unmount()
        if "Traceback" in (said := writer.errors.read_text()):
            report.faults.append(f"cut {cut}: unclear: {said}")
        done = writer.acknowledged()
        report.acknowledged += len(done)
        there.update(done)
        disk.mount()
        for number in sorted({*there, max(there | spoilt, default=-1) + 1}):
            if what := _fault(store, number, is_due=number in there):
                report.faults.append(f"cut {cut}: {what} of number {number}")
                there.discard(number)
                spoilt.add(number)
        disk.unmount()
    disk.mount()
    following = max(there | spoilt, default=-1) + 1
    writer = start(range(following, following + 2))
    if writer.wait() != 0:
        report.faults.append(f"cut {cuts[-1]}: stuck: {writer.errors.read_text()}")
    disk.unmount()


def flush_nothing() -> None:
    """Let this process flush nothing to the disk."""
    os.fsync = lambda descriptor: None


def _fault(store: LocalStore, number: int, *, is_due: bool) -> str:
    """Return what is wrong with what a reader finds; "" if nothing is."""
    found = find_artifact(store, STAGE, identity_of(number).fingerprint)
    if found.state == "none":
        return "lost" * is_due
    if found.state == "torn":
        return f"torn: {found.why}"
    return "different" * (found.digest != digest_of_toy())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
