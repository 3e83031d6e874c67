"""Commits small artifacts and acknowledges each one: the program that the crash tests kill.

A commit is what a stage does when its job is done: the lease, the files and the log, the manifest,
the lease given back. Started as a program it is a nursery: for each `Order` on its input, a line of
JSON, it forks a writer, so that a writer costs milliseconds and not the seconds of an import. It
answers with the writer's pid and, when that ended, with its exit status.

A writer gets ready (artifacts to publish, a client that is connected), waits for SIGUSR1, and
commits. Every system call from then on is the commit's own.
"""

import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from flows.artifacts import publish
from flows.identity.fingerprint import Identity
from flows.identity.manifest import File, Manifest, digest_of
from flows.leases.held_lease import HeldLease, try_acquire
from flows.leases.lease import Lease
from flows.leases.process import Process
from infra.storage.base import ObjectNotFound, OnBytes, Store, ignore_bytes
from infra.storage.local import LocalStore
from infra.storage.open import open_store
from nanochat_core.errors import NanochatError, StoreError
from tests.support.flows import rows

ROOT = Path(__file__).parents[3]
STAGE = "toy"
SIZES = {"empty.json": 0, "tokenizer/small.bin": 700, "weights.bin": 20_000}  # bytes
Fsync: TypeAlias = Literal["all", "directories", "files", "none"]
Writes: TypeAlias = Literal["artifacts", "objects"]  # objects: one Store.put each, no more
Kind: TypeAlias = Literal["as it is", "in place"]  # of store
_DIE_WITH_PARENT, _MAY_BE_TRACED_BY = 1, 0x59616D61  # PR_SET_PDEATHSIG, PR_SET_PTRACER
_ANYBODY = ctypes.c_ulong(-1)
_fsync = os.fsync  # the real one


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a writer is to do."""

    url: str  # of the store
    scratch: str  # a directory of its own, outside the store
    first: int  # number of the first artifact to commit
    last: int | None  # None: until it is killed
    store: Kind = "as it is"  # "in place" writes without a temporary
    writes: Writes = "artifacts"
    fsync: Fsync = "all"  # what is flushed to the disk
    serial: bool = False  # one file at a time: the nth system call is always the same one

    @property
    def acknowledgements(self) -> Path:
        """A line for each commit that was reported as done: number and digest."""
        return Path(self.scratch) / "acknowledged"

    @property
    def errors(self) -> Path:
        """What the writer printed."""
        return Path(self.scratch) / "errors"


@dataclass(frozen=True, kw_only=True)
class Toy:
    """An artifact to publish."""

    identity: Identity
    output: Path
    log: Path


def make_toy(number: int, directory: Path) -> Toy:
    """The toy with this number, written below a directory."""
    output, log = directory / f"{number}" / "output", directory / f"{number}" / "events.jsonl"
    for name, data in _files(number).items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    log.write_bytes(b"{}\n" * 100)
    return Toy(identity=identity_of(number), output=output, log=log)


def identity_of(number: int) -> Identity:
    """Of the toy with this number."""
    return rows.identity_of(STAGE, number=number)


@cache
def digest_of_toy(number: int) -> str:
    """What the digest of its artifact must be."""
    return digest_of(
        File(path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest(), key="a")
        for name, data in _files(number).items()
    )


def object_key(number: int) -> str:
    """Where a single object goes; its contents are the digest of the toy."""
    return f"{STAGE}/objects/{number}"


def _files(number: int) -> dict[str, bytes]:
    chance = random.Random(number)
    return {name: chance.randbytes(size) for name, size in SIZES.items()}


def commit(store: Store, toy: Toy) -> Manifest:
    """Publish a toy under its lease. Raises NanochatError."""
    found = publish.find_manifest(store, toy.identity.ref)
    if found is not None:
        return found
    claim = Lease.claim("toy-1")
    held = try_acquire(store, toy.identity.ref, claim)
    assert isinstance(held, HeldLease), "one writer at a time, all of one machine"
    holder = {"run": claim.run, "owner": held.record.owner, "epoch": held.record.epoch}
    published = publish.publish(
        store,
        toy.identity,
        toy.output,
        logs=[toy.log],
        inputs={},
        provenance=replace(rows.PROVENANCE, **holder),
        check_lease=held.check,
    )
    held.release()
    return published.manifest


def read_acknowledged(order: Order) -> dict[int, str]:
    """Number -> digest of every commit that was reported as done. A line cut short was not."""
    lines = order.acknowledgements.read_text().splitlines(keepends=True)
    pairs = (line.split() for line in lines if line.endswith("\n"))
    return {int(number): digest for number, digest in pairs}


def open_warm(url: str) -> Store:
    """A store that is connected, and whose conditions were tried before."""
    store = open_store(url)
    if url.startswith("s3:"):
        from infra.storage.s3.store import S3Store

        assert isinstance(store, S3Store)
        store.faults = ()
    with contextlib.suppress(ObjectNotFound):
        store.head(f"{STAGE}/warm")
    return store


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

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store."""
        self.put(key, path.read_bytes())


class Nursery:
    """The program, running; a context manager. One writer at a time."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.reliability.commit_step"],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # a writer dies with it
        self._process.communicate()

    def start(self, order: Order) -> int:
        """A writer, ready; its pid. SIGUSR1 has it begin."""
        assert self._process.stdin is not None
        Path(order.scratch).mkdir(parents=True, exist_ok=True)
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        pid = self._read("ready")
        assert pid, order.errors.read_text()
        return pid

    def wait(self) -> int:
        """How the writer ended: its exit code, or minus the signal that killed it."""
        return self._read("ended")

    def _read(self, name: str) -> int:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())[name]


def main() -> None:
    """Fork a writer for each order on stdin."""
    _prctl(_DIE_WITH_PARENT, ctypes.c_ulong(signal.SIGKILL))
    if "AWS_ENDPOINT_URL_S3" in os.environ:
        importlib.import_module("infra.storage.s3.store")
    for line in sys.stdin:
        order = Order(**json.loads(line))
        ready, ready_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            _be_writer(order, ready_end)
        os.close(ready_end)
        _say(ready=pid if os.read(ready, 1) else 0)
        os.close(ready)
        _say(ended=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _say(**what: int) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


def _be_writer(order: Order, ready_end: int) -> None:
    """In the child: write what is ordered, and end as the command line does."""
    _prctl(_DIE_WITH_PARENT, ctypes.c_ulong(signal.SIGKILL))
    _prctl(_MAY_BE_TRACED_BY, _ANYBODY)
    errors = os.open(order.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, sys.stderr.fileno())
    code = 1
    try:
        _write(order, lambda: os.write(ready_end, b"."))
        code = 0
    except NanochatError as error:
        os.write(2, f"error: {error}\nhint: {error.hint}\n".encode())
    except BaseException:  # noqa: BLE001 - what a person would see
        traceback.print_exc()
    finally:
        os._exit(code)


def _write(order: Order, report_ready: Callable[[], object]) -> None:
    store = open_warm(order.url)
    if order.store == "in place":
        store = InPlaceStore(Path(order.url.removeprefix("file://")))
    os.fsync = partial(_flush, order.fsync)
    if order.serial:
        publish.transfer_each = _one_by_one
    numbers = count(order.first) if order.last is None else range(order.first, order.last + 1)
    ready = {order.first: make_toy(order.first, Path(order.scratch))}
    me = Process.this()  # read from /proc, which has no disk that could fail
    Process.this = staticmethod(lambda: me)
    log = os.open(order.acknowledgements, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    report_ready()
    signal.sigwait({signal.SIGUSR1})
    for number in numbers:
        if order.writes == "artifacts":
            toy = ready.pop(number, None) or make_toy(number, Path(order.scratch))
            digest = commit(store, toy).digest
        else:
            digest = digest_of_toy(number)
            store.put(object_key(number), digest.encode())
        _acknowledge(log, f"{number} {digest}\n".encode())


def _acknowledge(log: int, line: bytes) -> None:
    try:
        os.write(log, line)
        _fsync(log)
    except OSError as error:  # a disturbance that came after the commit
        raise StoreError(f"cannot acknowledge: {error.strerror}") from error


def _flush(what: Fsync, descriptor: int) -> None:
    """os.fsync, of what is flushed at all."""
    is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    if what in ("all", "directories" if is_directory else "files"):
        _fsync(descriptor)


def _one_by_one(
    function: Callable[[Any, OnBytes], Any],
    items: Sequence[Any],
    *,
    on_bytes: OnBytes = ignore_bytes,
) -> list[Any]:
    return [function(item, on_bytes) for item in items]


def _prctl(option: int, value: ctypes.c_ulong) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
