"""Who takes part in a simulated history: builders, which run flows.building.build, and readers.

Of the product's own code a builder leaves out what has nothing to do with the store: fingerprinting
(there is one fingerprint), the job (a sleep under the lease) and the facts recorded about it. A
rude builder knows no leases, as another tool: put-if-absent alone protects from it.
"""

import contextlib
import hashlib
import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest

import flows.building.build
import flows.leases.acquire
import flows.leases.file_lock
import flows.leases.held_lease
import flows.leases.process
import infra.polling
import infra.retry
from flows.artifacts.publish import find_manifest, publish
from flows.artifacts.revocations import revoke
from flows.building.build import BuildContext, Built, Lookup, build
from flows.identity.fingerprint import Identity
from flows.identity.manifest import File, Manifest
from flows.identity.redo import find_redo
from flows.leases.held_lease import HeldLease, LeaseTimings
from flows.profiles import open_profile
from flows.stages import Stage
from infra.placement import Placement
from infra.storage.base import ObjectNotFound, Retry, call_once
from nanochat_core.config import RunConfig
from nanochat_core.errors import ArtifactError, NanochatError
from tests.support.flows.rows import PROVENANCE, identity_of
from tests.support.reliability.sim_s3 import SimS3Store
from tests.support.reliability.sim_store import Objects, SimStore
from tests.support.reliability.sim_system import SimSystem
from tests.support.reliability.sim_world import Process, World
from tests.support.small_job import one_thread

TERMS = LeaseTimings(ttl=120.0, beat=25.0, poll=8.0, max_poll=60.0)  # virtual seconds
IDENTITY = identity_of("rows")
_STAGE = Stage(name="rows", makes="a toy", inputs=(), config=(), entry="tasks.toy", compute="cpu")
AnyStore: TypeAlias = SimStore | SimS3Store


@contextlib.contextmanager
def open_scratch() -> Generator[Path]:
    """A directory for the homes and outputs of histories, one after the other; in memory."""
    in_memory = Path("/dev/shm")
    where = in_memory if in_memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="nanochat-simulation-", dir=where) as directory:
        yield Path(directory)


@lru_cache
def _run() -> RunConfig:
    return open_profile("tiny").run


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What all actors of a history share."""

    world: World
    referee: Any  # the referee of this kind of history
    open_store: Callable[[Objects, Process], AnyStore]
    scratch: Path

    def output_of(self, content: bytes) -> Path:
        """A finished job's output: one file."""
        output = self.scratch / "outputs" / content.hex()
        if not output.exists():
            output.mkdir(parents=True)
            (output / "value").write_bytes(content)
        return output

    def context(self, process: Process, **facts: Any) -> BuildContext:
        """Return what a run of a process builds with; `facts` are those of its own."""
        placement = Placement(
            home=self.scratch / process.home,
            store="sim://store",
            gpus=0,
            resources=one_thread(save_every_seconds=60.0),
        )
        stop: Any = SimSystem(self.world).Event()
        store = cast("Actor", process.program).store
        common = {"placement": placement, "store": store, "strict": True, "terms": TERMS}
        return BuildContext(**common, stop=stop, **facts)


class Actor:
    """A process's program."""

    def __init__(self, scene: Scene, process: Process) -> None:
        self.scene = scene
        self.world = scene.world
        self.referee = scene.referee
        self.process = process
        self.store = scene.open_store(scene.referee.objects, process)
        self.process.program = self

    def main(self) -> None:
        """Run to the end."""
        raise NotImplementedError

    def find(self) -> Manifest | None:
        """Return the newest artifact of the recipe."""
        redo = find_redo(self.store, IDENTITY.ref)
        for number in range(redo.number, -1, -1):
            if found := find_manifest(self.store, IDENTITY.redone(number).ref):
                return found
        return None


class Builder(Actor):
    """A run that wants the artifact, and tries again after any error."""

    def __init__(
        self,
        scene: Scene,
        process: Process,
        *,
        run: str,
        content: bytes,
        force: bool = False,
        rude: bool = False,
    ) -> None:
        super().__init__(scene, process)
        self.run = run
        self.content = content
        self.force = force
        self.rude = rude
        self.attempts = 0

    def main(self) -> None:
        """Until the artifact is there."""
        while True:
            try:
                self.build_rudely() if self.rude else self.build()
                return
            except NanochatError as error:
                self.world.met[type(error).__name__] += 1
                self.world.note(self.process, f"failed: {error}")
                self.world.sleep(self.process, 5.0 + 10.0 * self.world.rng.random())

    def build(self) -> None:
        """One attempt of a run."""
        context = self.scene.context(
            self.process,
            run=_run(),
            run_id=self.run,
            watch=lambda stage, event: self.world.note(self.process, str(event)),
        )
        revoked = set(self.referee.revoked)
        built = build(_STAGE, context, {}, force=self.force)
        self.referee.on_used(built.manifest, revoked)

    def build_under(
        self,
        stage: Stage,
        context: BuildContext,
        identity: Identity,
        inputs: Mapping[str, Manifest],
        lease: HeldLease,
    ) -> Built:
        """Run a job and publish, as flows.building.build does under its lease."""
        self.world.sleep(self.process, self.seconds_of_job())
        lease.raise_if_lost()
        self.referee.owners[self.process] = lease.record.owner
        wait = context.wait_for_store(stage.name, check=lease.raise_if_lost)
        manifest = self.publish(
            identity,
            check_lease=lease.check,
            owner=lease.record.owner,
            epoch=lease.record.epoch,
            retry=wait,
        )
        return Built(manifest=manifest, uri="", cached=False)

    def build_rudely(self) -> None:
        """Without a lease."""
        if self.find() is None:
            self.world.sleep(self.process, self.seconds_of_job())
            self.publish(
                IDENTITY, check_lease=lambda: None, owner="nobody", epoch=0, retry=call_once
            )

    def seconds_of_job(self) -> float:
        """Some take longer than a lease lasts without renewals."""
        return self.world.rng.choice((10.0, 60.0, 200.0)) * self.world.rng.random()

    def publish(
        self,
        identity: Identity,
        *,
        check_lease: Callable[[], None],
        owner: str,
        epoch: int,
        retry: Retry,
    ) -> Manifest:
        """Under a name of this attempt, so that the referee knows who won."""
        self.attempts += 1
        published = publish(
            self.store,
            identity,
            self.scene.output_of(self.content),
            logs=[],
            inputs={},
            provenance=replace(
                PROVENANCE,
                run=self.run,
                owner=owner,
                epoch=epoch,
                metrics={"process": self.process.name, "attempt": self.attempts},
            ),
            check_lease=check_lease,
            retry=retry,
        )
        self.referee.on_published(published, self.process, self.attempts)
        return published.manifest


class Reader(Actor):
    """Fetches the artifact as soon as it is there, byte for byte."""

    reads = 2

    def main(self) -> None:
        """Read it a few times, whatever happens meanwhile."""
        while self.reads:
            try:
                self.reads -= self.read()
            except NanochatError as error:
                self.world.note(self.process, f"failed: {error}")
            self.world.sleep(self.process, 1.0 + 60.0 * self.world.rng.random())

    def read(self) -> bool:
        """As flows.artifacts.cache.fetch does it, without a disk. Whether there was an artifact."""
        manifest = self.find()
        if manifest is None:
            return False
        for file in manifest.files:
            try:
                data = self.store.get(file.key)
            except ObjectNotFound:
                self.referee.on_gone(file.key)
                raise
            if not self.is_whole(data, file):
                raise ArtifactError(f"{file.key} is damaged")
            self.referee.on_read(data)
        return True

    @staticmethod
    def is_whole(data: bytes, file: File) -> bool:
        """Whether these are the bytes that the manifest speaks of."""
        return len(data) == file.size and hashlib.sha256(data).hexdigest() == file.sha256


class Reviser(Actor):
    """Revokes an artifact, once."""

    def main(self) -> None:
        """As soon as there is one."""
        while True:
            self.world.sleep(self.process, 1.0 + 60.0 * self.world.rng.random())
            try:
                if manifest := self.find():
                    when = "2026-11-21T05:53:38Z"
                    revoke(
                        self.store, manifest, why="it is wrong", who=self.process.name, when=when
                    )
                    self.referee.on_revoked(manifest)
                    return
            except NanochatError as error:
                self.world.note(self.process, f"failed: {error}")


def _build_simulated(
    stage: Stage,
    context: BuildContext,
    lookup: Lookup,
    inputs: Mapping[str, Manifest],
    *,
    lease: HeldLease,
) -> Built:
    """In place of flows.building.build._build, in the process that calls it."""
    builder: Any = cast("AnyStore", context.store).process.program
    return builder.build_under(stage, context, lookup.identity, inputs, lease)


@contextlib.contextmanager
def simulated(
    world: World,
    *more: tuple[Any, str, Any],
    identify: Callable[..., Identity] = lambda *a, **k: IDENTITY,
) -> Generator[None]:
    """Give the product's modules the world's clock, threads and names while the block runs.

    Each of `more` is an object, an attribute, and what stands there instead.
    """
    system = SimSystem(world)
    patches: tuple[tuple[Any, str, Any], ...] = (
        (flows.leases.held_lease, "threading", system),
        (infra.polling, "time", system),
        (infra.retry, "time", system),
        (flows.leases.acquire, "time", system),
        (infra.retry, "random", world.rng),
        (flows.leases.acquire, "POLL_SECONDS", 10.0),
        (flows.leases.file_lock, "time", system),
        (flows.leases.process, "os", system),
        (flows.leases.process, "socket", system),
        (flows.leases.process, "_read", system.read_file),
        (flows.leases.process, "boot_id", system.boot_id),
        (flows.leases.process, "pid_namespace", system.pid_namespace),
        (flows.leases.process, "FIRST_NAMESPACE", "0"),
        (flows.leases.process, "read_stat", system.read_stat),
        (flows.building.build, "time", system),
        (flows.building.build, "Code", lambda root, cache: None),
        (flows.building.build, "identify_from", identify),
        (flows.building.build, "_build", _build_simulated),
        (uuid, "uuid4", world.uuid4),
        *more,
    )
    with pytest.MonkeyPatch.context() as patch:
        for target, name, value in patches:
            patch.setattr(target, name, value)
        yield
