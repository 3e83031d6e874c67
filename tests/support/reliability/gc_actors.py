"""Who uses a store while its garbage is collected: runs, collectors, and people with commands.

Runs are flows.building.build.build for three stages, with the record that
flows.orchestration.pipeline keeps. Left out are fingerprinting (a stage's variant is its whole
pre-image) and the jobs, which are sleeps that leave checkpoints.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import flows.plan.accept
from flows.artifacts.pins import pin, reserve
from flows.artifacts.publish import find_manifest, publish
from flows.artifacts.revocations import accepted_from, find_revoked, revoke
from flows.artifacts.runs import Run, RunRecord, find_run, new_run_id, point, timestamp
from flows.building.build import BuildContext, Built, build
from flows.gc.collect import collect
from flows.identity.fingerprint import Identity, fingerprint_of
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases.held_lease import HeldLease
from flows.plan.accept import Offer, accept
from flows.stages import Stage
from infra.storage.base import ObjectNotFound, Store
from nanochat_core.errors import ArtifactError, NanochatError
from nanochat_core.section import Tree
from tests.support.flows.rows import PROVENANCE
from tests.support.reliability import sim_actors as actors
from tests.support.reliability.sim_actors import Scene
from tests.support.reliability.sim_world import Process, World

_SHARDS = Stage(name="shards", makes="", inputs=(), config=(), entry="tasks.a", compute="cpu")
_ROWS = Stage(name="rows", makes="", inputs=(_SHARDS,), config=(), entry="tasks.b", compute="cpu")
_MODEL = Stage(
    name="model", makes="", inputs=(_SHARDS, _ROWS), config=(), entry="tasks.c", compute="cpu"
)
STAGES = (_SHARDS, _ROWS, _MODEL)
Variants = Mapping[str, int]  # stage -> what stands for its configuration and code
_TRIES = 3
_VARIANTS = 3
_CONTENTS = 20
ACCEPTED = 10  # variants from here on are made by accepting another


class Actor(actors.Actor):
    """A process's program, which tries a few times."""

    def main(self) -> None:
        """Attempt it until it does not fail, a few times at most."""
        for _ in range(_TRIES):
            try:
                return self.attempt()
            except (NanochatError, ObjectNotFound) as error:
                self.world.note(self.process, f"failed: {error}")
                self.pause(30.0 * self.world.rng.random())

    def attempt(self) -> None:
        """What it does; may raise NanochatError."""
        raise NotImplementedError

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        self.world.sleep(self.process, seconds)

    def log(self, text: str) -> None:
        """Count a wait for a collection."""
        self.world.met["waited"] += 1
        self.world.note(self.process, text)

    def some_artifact(self) -> Manifest:
        """Any that is there."""
        stage = self.world.rng.choice(STAGES).name
        entries = [e.key for e in self.store.list(f"index/{stage}/")]
        if not entries:
            raise ArtifactError("there is none")
        manifest = find_manifest(
            self.store, ArtifactRef(stage, self.world.rng.choice(entries)[-64:])
        )
        if manifest is None:
            raise ArtifactError("it is gone")
        return manifest


class Runner(Actor):
    """A run of the pipeline."""

    def __init__(
        self, scene: Scene, process: Process, *, run: str, variants: Variants, force: frozenset[str]
    ) -> None:
        super().__init__(scene, process)
        self.run = run
        self.variants = variants
        self.force = force

    def attempt(self) -> None:
        """As flows.orchestration.pipeline.run_pipeline, one stage after the other."""
        started = timestamp(1.8e9 + self.world.now)
        record = RunRecord(
            self.store,
            Run(
                run=self.run,
                name=self.run.partition("-")[0],
                profile="tiny",
                depth=None,
                overrides=(),
                status="running",
                started=started,
                ended=None,
                stages={},
            ),
        )
        self.referee.on_started(self.run)
        record.write()
        context = self.context(record)
        built: dict[str, Manifest] = {}
        try:
            for stage in STAGES:
                inputs = {source.name: built[source.name] for source in stage.inputs}
                done = build(stage, context, inputs, force=stage.name in self.force)
                self.referee.on_artifact(self.run, done.manifest)
                self.world.met["reused"] += done.cached
                built[stage.name] = done.manifest
                self.pause(self.world.rng.choice((0.0, 10.0)) * self.world.rng.random())
        except NanochatError:
            record.end("failed")
            raise
        record.end("finished", {name: m.fingerprint for name, m in built.items()})

    def context(self, record: RunRecord) -> BuildContext:
        """As flows.orchestration.pipeline makes it."""
        return self.scene.context(
            self.process, run=self.variants, run_id=self.run, watch=self.watch, record=record.add
        )

    def watch(self, stage: str, event: dict[str, Any]) -> None:
        """Events of a build."""
        if "garbage" in event.get("text", ""):
            self.world.met["waited"] += 1
        self.world.note(self.process, f"{stage}: {event}")

    def build_under(
        self,
        stage: Stage,
        context: BuildContext,
        identity: Identity,
        inputs: Mapping[str, Manifest],
        lease: HeldLease,
    ) -> Built:
        """What flows.building.build does when it is its turn: a job, then publishing."""
        rng = self.world.rng
        root = f"{stage.name}/{identity.fingerprint}/checkpoints/step-0000010"
        if rng.random() < 0.3:
            self.store.put(f"{root}/{lease.record.owner}-{lease.record.epoch}/model", b"x")
            self.store.put(f"{root}/COMMIT.json", b"x")
        self.pause(rng.choice((5.0, 30.0, 200.0)) * rng.random())
        lease.raise_if_lost()
        content = str(int(identity.fingerprint[:4], 16) % _CONTENTS).encode()
        published = publish(
            self.store,
            identity,
            self.scene.output_of(content if rng.random() < 0.9 else b"another"),
            logs=[self.scene.output_of(b"log") / "value"],
            inputs=inputs,
            provenance=dataclasses.replace(
                PROVENANCE,
                run=self.run,
                owner=lease.record.owner,
                epoch=lease.record.epoch,
                created=timestamp(1.8e9 + self.world.now),
                metrics={},
            ),
            check_lease=lease.check,
        )
        self.referee.on_made(published.manifest)
        context.record(published.manifest.ref)
        return Built(manifest=published.manifest, uri="", cached=False)


class Collector(Actor):
    """`nanochat gc --apply`."""

    def attempt(self) -> None:
        """One collection."""
        self.referee.collectors.add(self.process)
        collect(
            self.store,
            self.referee.rules,
            threads=1,
            clock=lambda: self.world.now,
            pause=self.pause,
            watch=lambda what, count: None,
            log=lambda text: None,
        )


class Accepter(Actor):
    """`nanochat accept`: the files of an artifact under another fingerprint."""

    def attempt(self) -> None:
        """Accept something."""
        old = self.some_artifact()
        variant = ACCEPTED + self.world.rng.randrange(_VARIANTS)
        identity = identity_of(
            old.stage, {old.stage: variant}, {n: i.digest for n, i in old.inputs.items()}
        )
        places = [old.ref, identity.ref, *old.input_refs]
        with pin(self.store, places, why="accept", log=self.log, pause=self.pause):
            found = find_manifest(self.store, old.ref)
            inputs = {ref.stage: find_manifest(self.store, ref) for ref in old.input_refs}
            there = {name: manifest for name, manifest in inputs.items() if manifest}
            if found is None or find_revoked(self.store, found) or there.keys() != inputs.keys():
                raise ArtifactError("it is gone")
            (stage,) = (stage for stage in STAGES if stage.name == old.stage)
            offer = Offer(
                manifest=found, stage=stage, identity=identity, inputs=there, what_changed=""
            )
            done = accept(self.store, offer, why="only a comment", who="me", when="now", proof=None)
            self.referee.on_made(done.manifest)


class Tagger(Actor):
    """`nanochat tag`: point a tag at some run."""

    def attempt(self) -> None:
        """Tag something."""
        runs = [entry.key for entry in self.store.list("runs/")]
        if not runs:
            return
        run = self.world.rng.choice(runs).removeprefix("runs/").removesuffix(".json")
        name = self.world.rng.choice(("main", "best"))
        reserve(self.store, lambda: point(self.store, name, run), log=self.log, pause=self.pause)
        if find_run(self.store, run) is not None:
            self.referee.on_tagged(name, run)


class Revoker(Actor):
    """`nanochat revoke`."""

    def attempt(self) -> None:
        """Revoke something."""
        manifest = self.some_artifact()
        if manifest.accepted:  # what its bytes were made as
            manifest = find_manifest(self.store, accepted_from(manifest)[0]) or manifest
        with contextlib.suppress(ArtifactError):
            revoke(self.store, manifest, why="wrong", who="me", when="now")


def draw_run(world: World, name: str) -> dict[str, Any]:
    """Arguments of a Runner."""
    rng = world.rng
    variants = {
        stage.name: rng.randrange(_VARIANTS) + (ACCEPTED if rng.random() < 0.15 else 0)
        for stage in STAGES
    }
    force = frozenset(stage.name for stage in STAGES if rng.random() < 0.2)
    run = new_run_id(name, timestamp(1.8e9 + world.now))
    return {"run": run, "variants": variants, "force": force}


def identity_of(stage: str, variants: Variants, digests: Mapping[str, str]) -> Identity:
    """Of a stage in a variant, made from inputs with these digests."""
    preimage: dict[str, Tree] = {
        "stage": stage,
        "format": 1,
        "config": {"variant": variants[stage]},
        "inputs": dict(digests),
        "code": {},
    }
    return Identity(stage=stage, fingerprint=fingerprint_of(preimage), preimage=preimage)


def _identity_from(
    stage: Stage, run: Any, inputs: Mapping[str, Manifest], *, code: None
) -> Identity:
    """In place of flows.identity.manifest.identify_from."""
    digests = {source.name: inputs[source.name].digest for source in stage.inputs}
    return identity_of(stage.name, run, digests)


def _check_there(store: Store, manifest: Manifest) -> None:
    """In place of flows.plan.accept._check_there. Raises ObjectNotFound."""
    for file in (*manifest.files, *manifest.logs):
        store.head(file.key)


def simulated_pipeline(world: World) -> contextlib.AbstractContextManager[None]:
    """Have the product's modules live in the world while a block runs."""
    # One after the other: threads have no greenlets.
    heads = (flows.plan.accept, "_check_there", _check_there)
    return actors.simulated(world, heads, identify=_identity_from)
