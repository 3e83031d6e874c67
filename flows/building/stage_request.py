"""A request to build one stage elsewhere: on a worker of another pool, or on another host.

A request is strings and numbers, so that it can be the parameters of a Prefect run or the arguments
of a command. The machine that executes it computes the fingerprint again and refuses if it differs
from the requested one: then its code or its datasets are not those of the caller.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from flows.artifacts.names import check_stage
from flows.artifacts.publish import find_manifest
from flows.artifacts.runs import Run
from flows.building.context import BuildContext, Built, Watch
from flows.building.nodes import build_share
from flows.identity.fingerprint import Code, Identity, fingerprint_of
from flows.identity.manifest import Manifest, identify_from
from flows.identity.record_types import read_record
from flows.identity.ref import ArtifactRef, short
from flows.profiles import make_placement, open_profile
from flows.run_request import shared
from flows.stages import Stage, stage_named
from infra.placement import default_home
from infra.storage.open import open_store
from nanochat_core.errors import ArtifactError, ConfigError


@dataclass(frozen=True, kw_only=True)
class StageRequest:
    """A stage to build: its identity, run, store and placement. Every field is plain JSON."""

    stage: str
    fingerprint: str  # all 64 hex digits, as the requesting run computed them
    redo: int = 0  # how often the recipe's artifact had been asked for again
    inputs: tuple[str, ...]  # each as stage/fingerprint, in the table's order
    profile: str
    depth: int | None = None
    overrides: tuple[str, ...] = ()
    run: str  # the id of the requesting run
    store: str  # URL of the artifact store, which this machine must reach too
    nodes: int = 1  # machines that build it together
    gpus: int | None = None
    place: tuple[str, ...] = ()
    strict: bool = False

    @property
    def ref(self) -> ArtifactRef:
        """Return the artifact to build."""
        return ArtifactRef(self.stage, self.fingerprint)


def match_digest(request: StageRequest, *, pool: str | None) -> str:
    """Return 12 hex digits that are equal for two requests if one build serves both.

    Such requests build the same artifact in the same store, on machines of the same pool, with the
    same number of nodes and processes, and are equally strict about code that the fingerprint does
    not cover. No other setting counts: a second Prefect run would occupy a worker for as long as it
    waits for the lease of the first.
    """
    # Without a number, as many GPUs as the profile can fill: what its machines have, as a rule.
    most = open_profile(request.profile, depth=request.depth, snapshots=False).pace.max_gpus
    return short(
        fingerprint_of(
            {
                "store": request.store,
                "pool": pool,
                "nodes": request.nodes,
                "gpus": most if request.gpus is None else request.gpus,
                "stage": request.stage,
                "fingerprint": request.fingerprint,
                "strict": request.strict,
            }
        )
    )


def make_request(
    stage: Stage,
    context: BuildContext,
    run: Run,
    inputs: Mapping[str, Manifest],
    *,
    identity: Identity,
) -> StageRequest:
    """Make the request with which another machine can build this stage for this run."""
    return StageRequest(
        stage=stage.name,
        fingerprint=identity.fingerprint,
        redo=identity.redo,
        inputs=tuple(inputs[source.name].ref.prefix for source in stage.inputs),
        store=context.store.url,
        nodes=context.placement.nodes,
        strict=context.strict,
        **shared(StageRequest, run),
    )


def read_request(text: str) -> StageRequest:
    """Return the request that is written as JSON. Raises ConfigError if it is not one."""
    try:
        return read_record(StageRequest, json.loads(text), where="the text", what="a stage request")
    except (ValueError, ArtifactError) as error:
        raise ConfigError(
            f"not a stage request: {error}",
            hint="give `nanochat stage` a profile and a stage; only runs write requests",
        ) from error


def build_on_node(
    request: StageRequest,
    *,
    node: int = 0,
    watch: Watch,
) -> Built:
    """Build this machine's share of a request: all of it if the request is for one node.

    Raises ConfigError if this machine would build something else, ArtifactError if an input is not
    in the store, and what `build` raises; of these JobFailed (NodeLost), LeaseLost and
    TransientStageError may succeed on a retry.
    """
    stage, context, inputs = open_request(request, watch=watch)
    check_same(request, stage, context, inputs)
    return build_share(stage, context, inputs, node=node, force=False, redo=request.redo)


def stage_of(request: StageRequest) -> Stage:
    """Return the stage that is requested. Raises ConfigError if no stage has that name."""
    return stage_named(check_stage(request.stage))


def open_request(
    request: StageRequest, *, watch: Watch
) -> tuple[Stage, BuildContext, dict[str, Manifest]]:
    """Return the stage, a build context for this machine, and the inputs' manifests by stage."""
    stage = stage_of(request)
    # Text and datasets were read by the caller, and their stages are inputs here: this machine
    # need not have them.
    opened = open_profile(
        request.profile, depth=request.depth, overrides=request.overrides, snapshots=False
    )
    home = default_home()
    placement = make_placement(
        opened.pace, home=home, store=request.store, gpus=request.gpus, settings=request.place
    )
    home.mkdir(parents=True, exist_ok=True)
    context = BuildContext(
        run=opened.run,
        run_id=request.run,
        placement=replace(placement, nodes=request.nodes),
        store=open_store(request.store),
        watch=watch,
        strict=request.strict,
    )
    wait = context.wait_for_store(request.stage)
    found = [wait(partial(_input, context, name)) for name in request.inputs]
    return stage, context, {manifest.stage: manifest for manifest in found}


def check_same(
    request: StageRequest, stage: Stage, context: BuildContext, inputs: Mapping[str, Manifest]
) -> None:
    """Raise ConfigError if this machine would build another artifact than the requested one."""
    if missing := [source.name for source in stage.inputs if source.name not in inputs]:
        raise ConfigError(f"the request for {request.ref.name} lacks its input {missing[0]}")
    code = Code(context.root, cache=context.work / "code.json")
    ours = identify_from(stage, context.run, inputs, code=code).redone(request.redo)
    if ours.fingerprint != request.fingerprint:
        raise ConfigError(
            f"{request.ref.name} was requested, but this machine would build {ours.ref.name}",
            hint="give worker and caller the same version of the code, also of packages with tasks",
        )


def _input(context: BuildContext, name: str) -> Manifest:
    ref = ArtifactRef.parse(name)
    manifest = find_manifest(context.store, ref)
    if manifest is None:
        raise ArtifactError(
            f"{ref.name} is not in {context.store.url}",
            hint="the worker must use the same store as the run: a directory is seen by one "
            "machine only",
        )
    return manifest
