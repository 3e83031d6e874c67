"""`nanochat stage`: build one stage on this machine, alone or as one of several nodes."""

import contextlib
import shlex
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.artifacts.names import STAGE_NAMES, check_stage
from flows.artifacts.runs import (
    Run,
    RunRecord,
    check_name,
    find_run,
    new_run,
    new_run_id,
    timestamp,
)
from flows.building.build import BuildContext, Built, reserve_found
from flows.building.nodes import build_share
from flows.building.retry import is_retryable
from flows.building.stage_request import build_on_node
from flows.building.stage_request import read_request as read_stage_request
from flows.cli.options import (
    DepthFlag,
    PlacementOptions,
    SetFlag,
    UseFlag,
    argv_of,
    check_gpus,
    parameter_of,
)
from flows.cli.output import print_error
from flows.cli.requests import plan_request, read_request
from flows.cli.train.run import resumable
from flows.identity.manifest import Manifest
from flows.leases import run_lock
from flows.plan.pinned import stages_before
from flows.plan.plan import Plan
from flows.plan.planned import open_settings
from flows.plan.upstream import Pins, moving_names, recorded_pins
from flows.run_request import RUN_NAME, STRICT, RunRequest
from flows.stages import Stage, stage_named
from infra.launch.rendezvous import assignments, find_gang
from infra.launch.torchrun import StageInterrupted
from infra.near import suggest
from infra.storage.base import Store
from nanochat_core.errors import ConfigError, NanochatError, StoreError

if TYPE_CHECKING:
    from flows.render.terminal import Display

# EX_TEMPFAIL of sysexits.h: the machine, another node or the store failed, and a retry may succeed.
# Batch scripts and pods requeue on it; infra/slurm/stage.sbatch reads the number.
LOST = 75


def stage(
    profile: str,
    stage: str | None = None,
    /,
    *,
    run_id: Annotated[str | None, Parameter(name="--run")] = None,
    force: bool = False,
    strict: Annotated[bool, parameter_of(STRICT, bool)] = False,
    depth: DepthFlag = None,
    overrides: SetFlag = (),
    use: UseFlag = (),
    run_name: Annotated[str | None, parameter_of(RUN_NAME)] = None,
    where: PlacementOptions = PlacementOptions(),
) -> int:
    """Build one stage here, without Prefect: what Slurm scripts and pods of a cluster run.

    Its inputs must be in the store. After a stop or a crash the same command resumes, on any
    machine. Exit code 75 means that the machine, another node or the store failed: retry it.

    Machines that build a stage together have torchrun's variables: PET_NNODES is their number,
    PET_NODE_RANK that of this one, 0 for the first, and PET_MASTER_ADDR the address of the first.

    For a run on Slurm or Kubernetes the scheduler starts `nanochat stage REQUEST`, with the request
    in JSON, which has all options.

    Args:
        profile: A profile or its TOML file; or the JSON of a request, alone.
        stage: Name of the stage, such as pretrain.
        run_id: Id of the run, the same on all machines and whenever the command is given again,
            such as a Slurm job's; default a new one. --force on several machines needs it.
        force: Build it again although it exists, unless this run built it.
    """
    given: dict[str, Any] = {"depth": depth, "overrides": overrides, "use": use}
    given["run_name"] = run_name
    options = [*argv_of(RunRequest(**given)), *where.argv]
    if profile.startswith("{"):
        if stage is not None or options or run_id or force or strict:
            raise ConfigError(
                "a request in JSON stands alone: it has the stage and all options",
                hint="give nothing else, or a profile and a stage",
            )
        return _build_request(profile)
    check_gpus(where.gpus)
    request = read_request(profile, where, **given)
    if stage is None:
        raise ConfigError("stage needs a stage after the profile", hint=suggest("", STAGE_NAMES))
    built_stage = stage_named(check_stage(stage))
    gang = find_gang()
    # Nodes agree on what counts as built again by the run's id, and each would make up its own.
    if force and gang.nodes > 1 and run_id is None:
        raise ConfigError(
            f"--force on {gang.nodes} nodes needs --run: by its id they know what is new",
            hint="give all nodes the same one, not used before, such as --run again-1",
        )
    check_name(run_id or request.profile)
    store = where.open_store()
    # Pins of this run win over those of earlier runs: a retry must not change its inputs.
    earlier = find_run(store, run_id) if run_id else None
    known = _known_pins(store, built_stage, request)
    if earlier is not None:
        known |= earlier.upstream
    planned = plan_request(request, where, known=known, only=built_stage)
    plan = planned.plan

    def command_for(name: str) -> str:
        return shlex.join(["nanochat", "stage", profile, name, *options])

    inputs = _find_inputs(plan, built_stage, command_for)
    called = run_id or new_run_id(planned.name, timestamp(time.time()))
    run = new_run(called, planned.name, request, upstream=planned.pins, uses=request.use)
    found = [item for item in plan.stages if item.state == "="]
    run = replace(run, stages={item.stage.name: item.fingerprint or "" for item in found})
    # The retry must have the same run id: by it the record and the --force of this run are found.
    again = f"{assignments()}{command_for(stage)}" + (" --strict" if strict else "")
    if run_id is not None:
        again += f" --run {shlex.quote(run_id)}" + (" --force" if force else "")

    def build(display: "Display") -> Built:
        context = BuildContext(
            run=planned.profile.run,
            run_id=run.run,
            placement=replace(planned.placement, nodes=gang.nodes),
            store=store,
            watch=display.watch,
            strict=strict,
        )
        # One record per run: node 0 writes it, the others only build their share.
        recorded = (
            contextlib.nullcontext(context) if gang.node else _recorded(run, plan, context, inputs)
        )
        with recorded as context:
            return build_share(built_stage, context, inputs, node=gang.node, force=force)

    return _run(build, stage=built_stage.name, again=again)


def _build_request(text: str) -> int:
    """Build this machine's share of the request that is written as JSON."""
    # A gang may come back with another number of machines than were requested.
    gang = find_gang()
    request = replace(read_stage_request(text), nodes=gang.nodes)
    return _run(
        lambda display: build_on_node(request, node=gang.node, watch=display.watch),
        stage=request.stage,
        again="the same command",
    )


def _run(build: Callable[["Display"], Built], *, stage: str, again: str) -> int:
    """Show a build's progress and its artifact; return the exit code."""
    from flows.orchestration.local_run import stoppable

    try:
        with resumable(again, stages=[stage]) as display, stoppable(display):
            built = build(display)
            display.say(f"{'cached' if built.cached else 'built'}  {built.uri}")
    except NanochatError as error:
        if not is_retryable(error):
            raise
        print_error(str(error), hint=error.hint)
        return LOST
    return 0


def _known_pins(store: Store, stage: Stage, request: RunRequest) -> Pins:
    """Return the upstream pins of earlier runs, without those that the stage itself downloads.

    The inputs were made from these pins. All nodes use the same ones, and need no network.
    """
    run = open_settings(request).run
    own = moving_names(run, stage.config)
    # Without a moving name among the inputs there is no reason to read all run records.
    if not set(moving_names(run)) - set(own):
        return {}
    pins = recorded_pins(store, request.profile)
    return {name: value for name, value in pins.items() if name not in own}


@contextlib.contextmanager
def _recorded(
    run: Run, plan: Plan, context: BuildContext, inputs: Mapping[str, Manifest]
) -> Generator[BuildContext]:
    """Write the run's record, yield the context that adds to it, and write how the block ended.

    Raises ConfigError if the run is recorded with other settings.

    Holds the run's lock meanwhile, so that the next command can end the record of a killed one.

    The record names the up-to-date artifacts of all stages, so that after the last of several
    commands it names all. Until then it says "interrupted": names such as sft@tiny stand for
    finished runs, and a part of a run must not replace one.
    """
    if (before := find_run(context.store, run.run)) is not None:  # by an earlier command of it
        for name in ("profile", "depth", "overrides", "uses"):
            if getattr(before, name) != getattr(run, name):
                raise ConfigError(
                    f"run {run.run} of {before.started} was of other settings ({name})",
                    hint="give --run an id that was not used before",
                )
        run = replace(run, started=before.started, stages={**before.stages, **run.stages})
    record = RunRecord(context.store, run)
    context = replace(context, record=record.add)
    with run_lock.hold(context.placement.home, run.run, store=context.store.url):
        try:
            record.write()
            # After the record is written: garbage collection may have marked the inputs between the
            # plan that found them and the record that refers to them.
            reserve_found(context, inputs.values())
            yield context
        except BaseException as error:
            is_interrupted = isinstance(error, StageInterrupted) or not isinstance(error, Exception)
            with contextlib.suppress(StoreError):  # must not replace the error that is being raised
                record.end("interrupted" if is_interrupted else "failed")
            raise
        stages = [item.stage.name for item in plan.stages]
        record.end("finished" if record.has(stages) else "interrupted")


def _find_inputs(
    plan: Plan, stage: Stage, command_for: Callable[[str], str]
) -> Mapping[str, Manifest]:
    """Return the stage's input artifacts. Raises ConfigError if one is not in the store.

    `command_for` returns the command that builds a stage.
    """
    before = stages_before(stage)
    for item in plan.stages:  # inputs first: the first that is missing is to be made first
        if item.stage.name in before and item.state != "=":
            raise ConfigError(
                f"{stage.name} needs {item.stage.name}, which is not in {plan.store}",
                hint=f"make it with: {command_for(item.stage.name)}",
            )
    found = {source.name: plan.of(source.name).manifest for source in stage.inputs}
    return {name: manifest for name, manifest in found.items() if manifest}
