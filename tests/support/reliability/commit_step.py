"""Writers that commit small artifacts and acknowledge each one, to be stopped at any moment.

A commit is what a stage does when its job is done: the lease, the files and the log, the manifest,
the release of the lease. A writer is a fork of this process: it costs milliseconds, not imports.
"""

import ctypes
import hashlib
import os
import random
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from flows.artifacts import publish
from flows.identity.fingerprint import Identity
from flows.identity.manifest import File, Manifest, digest_of
from flows.leases.held_lease import HeldLease, try_acquire
from flows.leases.lease import Lease
from flows.leases.process import Process
from infra.storage.base import Store
from nanochat_core.errors import NanochatError, StoreError
from tests.support.flows import rows

STAGE = "toy"
TRAIN = random.Random(1).randbytes(20_000)  # the bytes of the largest file
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_fsync = os.fsync  # the real one


def identity_of(number: int) -> Identity:
    """Of the artifact with this number."""
    return rows.identity_of(STAGE, number=number)


@cache
def digest_of_toy() -> str:
    """Return what the digest of each artifact must be: all have the files of write_output."""
    files = {"rows.json": b"{}", "sub/empty.bin": b"", "train.rows": TRAIN}
    return digest_of(
        File(path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest(), key="a")
        for name, data in files.items()
    )


def commit(store: Store, number: int, scratch: Path) -> Manifest:
    """Publish an artifact under its lease, from files in `scratch`. Raises NanochatError."""
    identity = identity_of(number)
    found = publish.find_manifest(store, identity.ref)
    if found is not None:
        return found
    claim = Lease.claim("toy-1")
    held = try_acquire(store, identity.ref, claim)
    assert isinstance(held, HeldLease), "one writer at a time, all of one machine"
    holder = {"run": claim.run, "owner": held.record.owner, "epoch": held.record.epoch}
    published = rows.publish_output(
        store,
        scratch / "work" / "output",
        identity=identity,
        logs=[scratch / "work" / "events.jsonl"],
        provenance=replace(rows.PROVENANCE, **holder),
        check_lease=held.check,
    )
    held.release()
    return published.manifest


class Writer:
    """A process that commits until all is done, or it is killed.

    `before` is called in it before the first commit; what it changes is changed there alone.
    """

    def __init__(
        self,
        make_store: Callable[[], Store],
        scratch: Path,
        numbers: range,
        *,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self.scratch = scratch
        self.errors = scratch / "errors"
        scratch.mkdir(parents=True, exist_ok=True)
        self.errors.touch()
        ready, is_ready = os.pipe()
        with warnings.catch_warnings(action="ignore"):  # of threads, which take no part in it
            self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
                store = make_store()
                me = Process.this()  # read from /proc, which has no disk that could fail
                Process.this = staticmethod(lambda: me)
                log = os.open(scratch / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                rows.write_output(scratch, train=TRAIN)
                os.close(is_ready)
                before()
                for number in numbers:
                    commit(store, number, scratch)
                    _acknowledge(log, number)
                code = 0
            except NanochatError as error:
                self.errors.write_text(f"error: {error}\nhint: {error.hint}\n")
            except BaseException:  # noqa: BLE001 - what a user would see
                self.errors.write_text(traceback.format_exc())
            finally:
                os._exit(code)
        os.close(is_ready)
        os.read(ready, 1)  # until it has closed its end
        os.close(ready)

    def wait(self) -> int:
        """Return its exit code, or minus the signal that killed it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def acknowledged(self) -> set[int]:
        """Return the number of each commit that was reported as done. A line cut short was not."""
        lines = (self.scratch / "acknowledged").read_text().splitlines(keepends=True)
        return {int(line) for line in lines if line.endswith("\n")}


def _acknowledge(log: int, number: int) -> None:
    try:
        os.write(log, f"{number}\n".encode())
        _fsync(log)
    except OSError as error:  # a disturbance that came after the commit
        raise StoreError(f"cannot acknowledge: {error.strerror}") from error
