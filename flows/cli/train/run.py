"""`nanochat run`: build every stage of a profile that is not up to date."""

import contextlib
import functools
import shlex
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.artifacts.runs import new_run_id, newest_runs, timestamp
from flows.cli.options import ProfileName, RunOptions, StoreOptions, check_workers
from flows.cli.output import password_line, print_error, print_lines, print_warning, screen
from flows.cli.requests import plan_request, read_request
from flows.identity.manifest import Manifest
from flows.identity.records import unless_damaged
from flows.identity.ref import ArtifactRef
from flows.overrides import check_name_of
from flows.plan.dead_runs import end_dead_runs
from flows.plan.plan import Plan
from flows.plan.render import render
from flows.render.table import Cell, Table, texts
from flows.render.text import duration
from flows.run_request import RunRequest, absolute_text
from flows.stages import CHAT_MODELS, EVALUATORS, PRETRAIN, REPORT, SFT
from infra.launch.torchrun import StageInterrupted
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from flows.artifacts.cache import Cache
    from flows.render.terminal import Display

DEPLOYMENT = "nanochat/nanochat"


def run(
    profile: ProfileName,
    /,
    *,
    submit: bool = False,
    options: RunOptions = RunOptions(),
) -> None:
    """Run every stage that is not up to date, and store what each one makes.

    After Ctrl-C, a crash or a lost machine, the same command resumes. If everything is up to date
    and the latest run of this name recorded it, nothing is started and no run is recorded.

    A run with the profile's own settings has the profile's name. With other settings it is called
    like tiny-d4 or tiny-1a2b3c, unless --name says otherwise.

    With --submit, which needs `nanochat up`, what is not given is as in the form: the worker's own
    store, and the pool gpu for GPU stages.

    Args:
        submit: Have a worker run it, as the form in Prefect's pages does, and return at once.
    """
    # The command finishes a rebuild that has begun; with --force it would begin again.
    data = None if options.data is None else absolute_text(options.data)
    once = replace(options, force=(), from_stage=None, data=data)
    again = shlex.join(["nanochat", "run", profile, *once.argv])
    request = read_request(profile, options)
    check_workers(request, is_here=not submit)
    if submit:
        return submit_run(request, options)
    home = options.home_path
    # Before anything is started: it refuses wrong stages and stores that cannot be reached, and the
    # command ends here if there is nothing to do.
    planned = plan_request(request, options)
    plan, store, name = planned.plan, planned.store, planned.name
    end_dead_runs(store, home)
    place = StoreOptions(home=options.home, store=options.store).argv
    if request.pool is not None:
        from flows.orchestration.local_run import check_pool_exists

        check_pool_exists(home, request.pool)
    if not plan.up_to_date:
        check_room(home, store)
    # Up to date but not recorded: another run made these artifacts. The flow then only writes the
    # record, so that names such as sft@tiny find them.
    elif request.pool is None and is_recorded(store, name, plan):
        made = {item.stage.name: item.manifest for item in plan.stages if item.manifest}
        print_lines([render(plan)[-1], "", ending(made, store, options.cache, name, place)])
        return
    # Imports Prefect, which takes seconds: only when there is something to run.
    from flows.orchestration.local_run import ready

    began = time.monotonic()
    with resumable(
        again,
        stages=[item.stage.name for item in plan.stages],
        expected={
            item.stage.name: item.estimate and item.estimate.seconds
            for item in plan.stages
            if item.state != "="
        },
        offer=functools.partial(first_chat, place),
    ) as display:
        display.say(f"run {name}: {render(plan)[-1]}")
        for setting in planned.settings:
            display.say(f"  {setting}")
        with ready(home, display, planned):
            from flows.orchestration.caller import call_flow
            from flows.orchestration.pipeline import nanochat

            if line := password_line(home):
                display.say(line)
            stages = call_flow(nanochat, **asdict(request)).stages
        cached, took = sum(s.cached for s in stages.values()), duration(time.monotonic() - began)
        display.say(f"run {name}: {len(stages) - cached} stages built, {cached} cached, in {took}")
    made = {stage: built.manifest for stage, built in stages.items()}
    print_lines(["", ending(made, store, options.cache, name, place)])


def submit_run(request: RunRequest, place: StoreOptions) -> None:
    """Create a flow run for the request, and print how to follow it."""
    from infra.prefect import flow_runs

    # The store as it was given: without one the worker takes its own.
    request = replace(request, store=place.store)
    # Before the server is asked: a mistake would otherwise fail the run, later and elsewhere.
    name = check_name_of(request)  # refuses wrong settings too
    if place.store is not None:
        # Contacts nothing: a worker may reach a store that this machine cannot.
        place.open_store()
    api_url = flow_runs.running_server(place.home_path)
    run = new_run_id(name, timestamp(time.time()))
    flow_run = flow_runs.submit(api_url, DEPLOYMENT, _parameters_of(request), name=run)
    words = StoreOptions(home=place.home, store=place.store).argv
    print_lines(
        [
            f"run      {run}",
            f"Prefect  {flow_runs.page_of(api_url.removesuffix('/api'), flow_run)}",
            f"status   {shlex.join(['nanochat', 'status', run, *words])}",
        ]
    )


def _parameters_of(request: RunRequest) -> dict[str, Any]:
    """Return the parameters of a flow run: the profile, and what differs from the default."""
    values = ((item, getattr(request, item.name)) for item in fields(request))
    return {i.name: value for i, value in values if i.name == "profile" or value != i.default}


def is_recorded(store: Store, name: str, planned: Plan) -> bool:
    """Return whether the latest run called `name` finished with exactly these artifacts.

    A damaged record counts as none: the run that follows writes another.
    """
    # Compare the stages as well: an older finished run of this name may have had other settings.
    latest = unless_damaged(lambda: next(newest_runs(store, name), None))
    artifacts = {item.stage.name: item.fingerprint for item in planned.stages}
    return latest is not None and latest.status == "finished" and latest.stages == artifacts


def check_room(home: Path, store: Store) -> None:
    """Raise ConfigError if the disk is too full for any run, StoreError if the store refuses."""
    from flows.cli.checks import check_home
    from infra.storage.s3.probe import TRIALS

    if (found := check_home(home)).state == "fail":
        raise ConfigError(found.found, hint=found.remedy)
    store.check_conditions()
    key = f"{TRIALS}/{uuid.uuid4().hex}"
    store.put_if_absent(key, b"")  # as a lease is taken: exFAT and some FUSE have no hard links
    store.delete(key)


@contextlib.contextmanager
def resumable(
    command: str, *, stages: Sequence[str], stderr: bool = False, **options: Any
) -> Generator["Display"]:
    """Open a display of `stages`; print the command that resumes if the block is interrupted.

    A stage stopped by SIGTERM ends as Ctrl-C does: KeyboardInterrupt, exit code 130. With `stderr`
    the display is there, and stdout belongs to the result.
    """
    from flows.render.terminal import Display

    say_how = functools.partial(print_error, "interrupted", hint=f"resume with: {command}")
    try:
        with Display(screen(stderr=stderr), stages=stages, on_leave=say_how, **options) as display:
            yield display
    except (KeyboardInterrupt, StageInterrupted):
        say_how()
        raise KeyboardInterrupt from None


def ending(
    made: Mapping[str, Manifest], store: Store, cache: "Cache", name: str, place: Sequence[str]
) -> Table:
    """Return the facts at the end of a run: what its models score, its report card, what is next.

    `made` are its artifacts, by stage. Prints a warning if an evaluation is damaged: the run has
    finished. Raises ArtifactError for a damaged report card, and StoreError.
    """
    from flows.artifacts.cache import fetch
    from flows.report.inputs import Artifact
    from flows.report.scores import chat_scores, summary

    lines: list[str] = []
    try:
        evaluations = {
            model.name: Artifact(manifest=m, files=fetch(store, m, cache) / "files", events=())
            for model in CHAT_MODELS
            if (m := made.get(EVALUATORS[model.name].name))
        }
        base = made.get(PRETRAIN.name)
        lines += summary(base.provenance.metrics if base else {}, chat_scores(evaluations))
    except ArtifactError as error:
        print_warning(f"no scores: {error}")
    if report := made.get(REPORT.name):
        lines.append(f"report card: {fetch(store, report, cache) / 'files' / 'report.html'}")
    chats = {name for model in CHAT_MODELS for name in (model.name, EVALUATORS[model.name].name)}
    model = name if chats & {*made} or report else f"{PRETRAIN.name}@{name}"
    if model == name or PRETRAIN.name in made:
        lines.append(f"next: {shlex.join(['nanochat', 'chat', model, *place])}")
    found = (line.partition(": ") for line in lines)
    return Table(
        columns=texts("name", "value"),
        rows=[(Cell(label, tone=label), text) for label, _, text in found],
        head=False,
    )


def first_chat(place: Sequence[str], stage: str, event: Mapping[str, Any]) -> str | None:
    """Return the command that talks to the SFT model while the run continues; None before."""
    if stage != SFT.name or event["kind"] != "finished":
        return None
    # By fingerprint: `sft@NAME` is that of the newest finished run, which may be an older one.
    model = ArtifactRef(stage, event["uri"].rpartition("/")[2]).name
    return f"first chat, in another terminal: {shlex.join(['nanochat', 'chat', model, *place])}"
