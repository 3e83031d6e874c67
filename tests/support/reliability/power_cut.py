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
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from infra.storage.local import LocalStore
from tests.support.reliability.commit_step import (
    STAGE,
    Fsync,
    Nursery,
    Order,
    Writes,
    digest_of_toy,
    identity_of,
    object_key,
    read_acknowledged,
)
from tests.support.reliability.verdict import find_artifact, find_object

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


def check(report: "Report") -> None:
    """Nothing acknowledged is missing, nothing is there in part."""
    bad = (report.lost, report.torn, report.different, report.unclear, report.stuck)
    assert bad == (0, 0, 0, 0, 0), report


@dataclass(kw_only=True)
class Report:
    """What a campaign has found so far."""

    cuts: int = 0
    acknowledged: int = 0
    lost: int = 0  # acknowledged, and not there after a cut
    torn: int = 0  # to be seen after a cut, and not whole
    different: int = 0  # there with another digest than was acknowledged
    unclear: int = 0  # writers that ended with a traceback
    stuck: int = 0  # disks on which an undisturbed writer could not go on afterwards
    unacknowledged: int = 0  # whole although the cut came before the acknowledgement: no fault
    examples: list[str] = field(default_factory=list)

    def note(self, what: str, example: str) -> None:
        """Count one more of a kind."""
        setattr(self, what, getattr(self, what) + 1)
        if len(self.examples) < 5:
            self.examples.append(f"cut {self.cuts}: {what}: {example}")


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


def cut_power(
    *, cuts: int, seed: int, fsync: Fsync = "all", writes: Writes = "artifacts"
) -> Report:
    """Cut the power at random moments, several times a disk."""
    chance = random.Random(seed)
    report = Report()
    with Nursery() as nursery:
        while report.cuts < cuts:
            wanted = min(_CUTS_OF_AN_IMAGE, cuts - report.cuts)
            with make_disk() as disk:
                order = Order(
                    url=(disk.mounted / "store").as_uri(),
                    scratch=str(disk.mounted.with_name("scratch")),
                    first=0,
                    last=None,
                    fsync=fsync,
                    writes=writes,
                )
                _wear_out(disk, nursery, order, report, cuts=wanted, chance=chance)
    return report


def _wear_out(
    disk: Disk, nursery: Nursery, order: Order, report: Report, *, cuts: int, chance: random.Random
) -> None:
    """Carry out an endless order on a disk whose power is cut again and again."""
    there: set[int] = set()  # numbers of what must be on the disk
    spoilt: set[int] = set()  # that were reported
    for _ in range(cuts):
        disk.mount()
        order = replace(order, first=max(there | spoilt, default=-1) + 1)
        pid = nursery.start(order)
        os.kill(pid, signal.SIGUSR1)
        if chance.random() < 0.5:  # a slow machine would always be cut before the first one
            _wait_for_one(order)
        time.sleep(chance.uniform(0.0, _LONGEST))
        disk.cut()
        with contextlib.suppress(ProcessLookupError):  # a write was refused already
            os.kill(pid, signal.SIGKILL)
        nursery.wait()
        disk.unmount()
        report.cuts += 1
        if "Traceback" in (said := order.errors.read_text()):
            report.note("unclear", said)
        done = read_acknowledged(order)
        report.acknowledged += len(done)
        there.update(done)
        disk.mount()
        _check(disk, order.writes, there, spoilt, report)
        disk.unmount()
    disk.mount()
    interrupted = max(there | spoilt, default=-1) + 1
    os.kill(
        nursery.start(replace(order, first=interrupted, last=interrupted + 1, fsync="all")),
        signal.SIGUSR1,
    )
    if nursery.wait() != 0:
        report.note("stuck", order.errors.read_text())
    disk.unmount()


def _wait_for_one(order: Order) -> None:
    """Until a commit is acknowledged; a store that the last cut damaged may never do so."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if order.acknowledgements.exists() and read_acknowledged(order):
            return
        time.sleep(0.005)


def _check(disk: Disk, writes: Writes, there: set[int], spoilt: set[int], report: Report) -> None:
    """All that must be there is, and what else can be seen is whole."""
    store = LocalStore(disk.mounted / "store")
    for number in sorted({*there, max(there | spoilt, default=-1) + 1}):
        verdict = (
            find_artifact(store, STAGE, identity_of(number).fingerprint)
            if writes == "artifacts"
            else find_object(store, object_key(number), digest_of_toy(number).encode())
        )
        what = {"none": "lost" if number in there else None, "torn": "torn"}.get(verdict.state)
        if verdict.state == "whole":
            what = None if verdict.digest in (None, digest_of_toy(number)) else "different"
            report.unacknowledged += number not in there
        if what is not None:
            report.note(what, f"number {number} {verdict.why}")
            there.discard(number)
            spoilt.add(number)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
