"""`nanochat stage`: build one stage on this machine, alone or as one of several nodes."""

import contextlib
import shlex
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from cyclopts import Group, Parameter

from flows.artifacts.names import check_stage
from flows.artifacts.runs import Run, RunRecord, check_name, find_run, new_run_id, timestamp
from flows.build.build import BuildContext, Built, reserve_found
from flows.build.nodes import build_share
from flows.build.retry import is_retryable
from flows.cli.options import PlacementOptions, ProfileName, RunOptions, pinned_profile, profile_of
from flows.cli.output import print_mistake, print_warning, screen
from flows.cli.train.run import saying_how_to_go_on
from flows.identity.manifest import Manifest
from flows.leases.held_lease import LeaseTimings
from flows.plan.pinned import open_pinned, sections_of, stages_before
from flows.plan.plan import Plan, make_plan
from flows.plan.upstream import Pins, moving_names, recorded_pins
from flows.stages import Stage, stage_named
from infra.launch.torchrun import StageInterrupted
from infra.storage.base import Store
from nanochat_core.errors import ConfigError, NanochatError, StoreError

LOST = 75  # EX_TEMPFAIL: what ended it was the machine, another node or the store
_NODES = Group("Several machines", sort_key=3)
_TERMS = LeaseTimings()


def stage(
    stage: Annotated[str, Parameter(help="Name of the stage, such as pretrain.")],
    profile: ProfileName,
    /,
    *,
    node: Annotated[
        int, Parameter(group=_NODES, help="Which of the machines this one is; 0 is the first.")
    ] = 0,
    nodes: Annotated[
        int, Parameter(group=_NODES, help="Machines that build the stage together.")
    ] = 1,
    wait: Annotated[
        float,
        Parameter(group=_NODES, help="Seconds that the machines wait for each other at first."),
    ] = _TERMS.meet,
    run_name: Annotated[
        str | None, Parameter(help="What to call the run; by default as its profile.")
    ] = None,
    run_id: Annotated[
        str | None,
        Parameter(
            name="--run",
            group=_NODES,
            help="Id of the run, the same on all machines and whenever the command is given again, "
            "such as a Slurm job's; default a new one. --force on several machines needs it.",
        ),
    ] = None,
    force: Annotated[
        bool,
        Parameter(
            negative="", help="Build it again although it is there, unless this run built it."
        ),
    ] = False,
    strict: Annotated[
        bool,
        Parameter(negative="", help="Whether code that a fingerprint does not see is an error."),
    ] = False,
    what: RunOptions = RunOptions(),  # noqa: B008 - frozen
    where: PlacementOptions = PlacementOptions(),  # noqa: B008 - frozen
) -> int:
    """Build one stage here, without Prefect: what Slurm scripts and pods of a cluster run.

    Its inputs must be in the store. Stopped, killed or on another machine, the same command goes on
    where it was. Ends with exit code 75 when it was lost, and may succeed when it is tried again.
    """
    where.check_gpus()
    built_stage = stage_named(check_stage(stage))
    _check_nodes(built_stage, node=node, nodes=nodes)
    if force and nodes > 1 and run_id is None:
        raise ConfigError(
            f"--force on {nodes} nodes needs --run: by its id they know what is new",
            hint="give all nodes the same one, not used before, such as --run again-1",
        )
    check_name(run_name or profile)
    check_name(run_id or profile)
    store = where.open_store()
    given = open_pinned(store, what.uses, warn=print_warning)
    earlier = find_run(store, run_id) if run_id else None
    known = _known_pins(store, built_stage, profile, what, given)
    if earlier is not None:
        known |= earlier.upstream
    chosen, pins = pinned_profile(
        profile, what, where.home_path, plan=False, known=known, given=given
    )
    placement = replace(where.placement(chosen), nodes=nodes)
    plan = make_plan(chosen.run, store, where.work, given=given)
    words = shlex.join(shlex.split(what.command(profile, place=where.words))[2:])
    inputs = _find_inputs(plan, built_stage, words)
    run = Run(
        run=run_id or new_run_id(run_name or profile, timestamp(time.time())),
        name=run_name or profile,
        profile=profile,
        depth=what.depth,
        overrides=what.overrides,
        upstream=pins,
        uses=what.uses,
        gpus=where.gpus,
        place=where.settings,
        status="running",
        started=timestamp(time.time()),
        ended=None,
        stages=_up_to_date(plan),
    )
    from flows.orchestration.local_run import stoppable
    from flows.render.terminal import Display

    again = f"nanochat stage {stage} {words}"
    if nodes > 1:
        again += f" --node {node} --nodes {nodes}"
    if run_id is not None:
        again += f" --run {shlex.quote(run_id)}" + (" --force" if force else "")
    with (
        _exit_code_of_lost() as ended,
        saying_how_to_go_on(again),
        Display(screen(soft_wrap=False), stages=[stage]) as display,
        stoppable(display),
    ):
        site = BuildContext(
            run=chosen.run,
            run_id=run.run,
            placement=placement,
            store=store,
            watch=display.watch,
            strict=strict,
            terms=replace(_TERMS, meet=wait),
        )
        with _recorded(run, site, inputs) if node == 0 else contextlib.nullcontext(site) as site:
            built: Built = build_share(built_stage, site, inputs, node=node, force=force)
        display.say(f"{'cached' if built.cached else 'built'}  {built.uri}")
    return ended.code


@dataclass
class _Ended:
    """How the command ends when nothing is raised."""

    code: int = 0


@contextlib.contextmanager
def _exit_code_of_lost() -> Generator[_Ended]:
    """Show what ended the block when another attempt may end otherwise, for scripts to try."""
    ended = _Ended()
    try:
        yield ended
    except NanochatError as error:
        if not is_retryable(error):
            raise
        print_mistake(error)
        ended.code = LOST


def _known_pins(
    store: Store, stage: Stage, profile: str, what: RunOptions, given: Mapping[str, Manifest]
) -> Pins:
    """Return what names upstream stood for in earlier runs, less those that the stage downloads.

    The inputs were made from these pins. All nodes use the same ones, and need no network.
    """
    run = profile_of(profile, what).run
    own = moving_names(run, stage.config)
    if not set(moving_names(run, sections_of(given))) - set(own):
        return {}
    pins = recorded_pins(store, profile)
    return {name: value for name, value in pins.items() if name not in own}


def _go_on(store: Store, run: Run) -> Run:
    """The run, with what its record says if an earlier turn of it has begun one.

    Raises ConfigError when that one trained something else.
    """
    before = find_run(store, run.run)
    if before is None:
        return run
    for name in ("profile", "depth", "overrides", "uses"):
        if getattr(before, name) != getattr(run, name):
            raise ConfigError(
                f"run {run.run} of {before.started} was of other settings ({name})",
                hint="give --run an id that was not used before",
            )
    return replace(run, started=before.started, stages={**before.stages, **run.stages})


@contextlib.contextmanager
def _recorded(
    run: Run, site: BuildContext, inputs: Mapping[str, Manifest]
) -> Generator[BuildContext]:
    """Yield the site of a run whose record the store has until the block ends.

    The record names what is up to date of all stages, so that the last of several commands names
    them all. The inputs are reserved: they were looked up before the record named them.
    """
    record = RunRecord(site.store, _go_on(site.store, run))
    site = replace(site, record=record.add)
    record.write()
    try:
        reserve_found(site, inputs.values())
        yield site
    except BaseException as error:
        is_interrupted = isinstance(error, StageInterrupted) or not isinstance(error, Exception)
        with contextlib.suppress(StoreError):  # perhaps the very error that is on its way
            record.end("interrupted" if is_interrupted else "failed")
        raise
    record.end("finished")


def _up_to_date(plan: Plan) -> dict[str, str]:
    """Fingerprints of the artifacts that are there, by stage."""
    items = [item for item in plan.stages if item.state == "=" and item.fingerprint]
    return {item.stage.name: item.fingerprint or "" for item in items}


def _check_nodes(stage: Stage, *, node: int, nodes: int) -> None:
    if nodes < 1:
        raise ConfigError(f"--nodes is {nodes}", hint="at least 1")
    if not 0 <= node < nodes:
        raise ConfigError(
            f"--node is {node}, --nodes is {nodes}", hint=f"numbers are 0 to {nodes - 1}"
        )
    if nodes > 1 and stage.compute == "cpu":
        raise ConfigError(
            f"{stage.name} is built by one machine, --nodes is {nodes}",
            hint="leave --nodes out, and start it once",
        )


def _find_inputs(plan: Plan, stage: Stage, words: str) -> Mapping[str, Manifest]:
    """The artifacts that the stage is made from. Raises ConfigError when one is not there."""
    before = stages_before(stage)
    missing = [item.stage.name for item in plan.stages if item.state != "="]
    items = [plan.of(source.name) for source in stage.inputs]
    for item in items:
        if item.stage.name in missing:
            first = next(name for name in missing if name in before)
            raise ConfigError(
                f"{stage.name} needs {item.stage.name}, which is not in {plan.store}",
                hint=f"make it with: nanochat stage {first} {words}",
            )
    return {item.stage.name: item.manifest for item in items if item.manifest}
