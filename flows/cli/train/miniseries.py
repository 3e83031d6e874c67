"""`nanochat miniseries`: train one profile at several depths and fit a scaling law to them."""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.cli.options import AsJson, PlacementOptions, ProfileName, WorkerOptions, parameter_of
from flows.cli.output import print_json, print_lines, print_warning
from flows.cli.recipes import read_recipe
from flows.cli.train.run import check_room, resumable
from flows.overrides import default_name
from flows.plan.upstream import pin
from flows.render.table import columns
from flows.render.text import duration
from flows.run_request import OVERRIDES, NamedRecipe, shared
from nanochat_core.errors import ConfigError

if TYPE_CHECKING:  # numpy, charts and Prefect are slow to import, and every command imports this
    from flows.miniseries.files import Files
    from flows.miniseries.findings import Findings
    from flows.miniseries.plan import SeriesPlan
    from flows.miniseries.series import Series

_EXAMPLE = "--depths 2,3,4,6"


def miniseries(
    profile: ProfileName,
    /,
    *,
    depths: Annotated[
        str | None,
        Parameter(
            help="Numbers of layers, such as 2,3,4,6: two to twelve. With --plot-only: default all "
            "that were evaluated."
        ),
    ] = None,
    overrides: Annotated[
        tuple[str, ...],
        parameter_of(OVERRIDES, tuple[str, ...]),
    ] = (),
    name: Annotated[
        str | None,
        Parameter(
            help="What to call the series; its runs are NAME-d4 and so on. Default PROFILE, with "
            "a suffix if any setting is changed."
        ),
    ] = None,
    plan: Annotated[
        bool, Parameter(negative="", help="Only show what would be done and how long it takes.")
    ] = False,
    plot_only: Annotated[
        bool,
        Parameter(negative="", help="Run nothing: table and picture of what the store has."),
    ] = False,
    where: PlacementOptions = PlacementOptions(),  # noqa: B008 - frozen
    workers: WorkerOptions = WorkerOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Train a base model at several depths and draw how its loss falls with compute.

    What depth does not decide is built once. Each depth is a run of its own, such as tiny-d4. The
    law is fitted to all depths that were evaluated, and lists its doubts.

    After Ctrl-C, a crash, a lost machine or a failed depth, the same command resumes.
    """
    chosen = None if depths is None else _parse(depths)
    profile, recipe = read_recipe(profile, NamedRecipe(overrides=overrides, run_name=name))
    if recipe.depth is not None:
        raise ConfigError(
            f"the profile is at depth {recipe.depth}, but a series has its own depths",
            hint="leave depth out of the file",
        )
    overrides, name = recipe.overrides, recipe.run_name
    if plot_only:
        return _plot(profile, chosen, overrides, name, where, as_json=as_json)
    if chosen is None:
        raise ConfigError("no depths are given", hint=f"for example {_EXAMPLE}")
    workers.check()
    where.check_gpus(elsewhere=workers.pool is not None)
    from flows.miniseries.plan import lines_of, plan_series, plan_to_json
    from flows.miniseries.series import open_series, pin_members
    from flows.orchestration.local_run import check_pool_exists

    # Names upstream are pinned once, for the largest depth, and all depths use these pins: datasets
    # that change during the series would make its depths incomparable.
    series = open_series(profile, chosen, overrides=overrides, name=name)
    largest = series.members[-1].profile
    _, pins = pin(largest.run, where.home_path, log=print_warning, plan=plan)
    series = pin_members(series, pins)
    store = where.open_store()
    planned = plan_series(series, store, where.work, where.placement(series.members[-1].profile))
    if plan:
        if as_json:
            sys.stdout.write(plan_to_json(planned) + "\n")
        else:
            print_lines(lines_of(planned))
        return planned.plan.exit_code
    if planned.plan.exit_code:  # what is built already needs no disk
        check_room(where.home_path, store)
    if workers.pool is not None:
        check_pool_exists(where.home_path, workers.pool)
    return _run(planned, overrides, where, workers, as_json=as_json)


def _run(
    planned: "SeriesPlan",
    overrides: Sequence[str],
    where: PlacementOptions,
    workers: WorkerOptions,
    *,
    as_json: bool,
) -> int:
    from flows.miniseries.findings import to_tree
    from flows.miniseries.plan import lines_of
    from flows.orchestration.local_run import ready

    series = planned.series
    began = time.monotonic()
    again = _command(series, overrides, [*where.words, *workers.words])
    with resumable(again, stages=[unit.label for unit in planned.units], stderr=as_json) as display:
        for line in [*lines_of(planned), ""]:
            display.say(line)
        with ready(where.home_path, display):
            # Imported here: `ready` first points Prefect at its server.
            from flows.miniseries.flow import MiniseriesRequest
            from flows.miniseries.flow import miniseries as flow

            swept: Any = flow(
                profile=series.profile,
                depths=tuple(member.depth for member in series.members),
                overrides=tuple(overrides),
                run_name=series.name,
                **shared(MiniseriesRequest, where.resolved, workers),
            )
    if as_json:
        print_json(to_tree(swept.findings))
        return 0
    took = duration(time.monotonic() - began)
    print_lines(["", f"{swept.built} stages built, {swept.cached} cached, in {took}", ""])
    print_lines(_lines(swept.findings, swept.files))
    if swept.ui_url:
        print_lines([f"Prefect  {swept.ui_url} (it keeps running; `nanochat down` stops it)"])
    return 0


def _plot(
    profile: str,
    depths: Sequence[int] | None,
    overrides: Sequence[str],
    name: str | None,
    where: PlacementOptions,
    *,
    as_json: bool,
) -> int:
    """Write and print table and picture of the runs in the store, without Prefect.

    Raises ConfigError if the store has no run of the series.
    """
    from flows.miniseries.files import write_files
    from flows.miniseries.findings import analyse, to_tree
    from flows.miniseries.points import depths_in, runs_of

    default = default_name(profile, overrides=overrides)  # refuses wrong names and values
    store, called = where.open_store(), name or default
    wanted = depths or depths_in(store, called)
    if not wanted:
        raise ConfigError(
            f"{store.url} has no runs called {called}-d1 or the like",
            hint=f"train them: nanochat miniseries {profile} {_EXAMPLE}",
        )
    # Without --set any overrides will do; with it, only runs made with the same ones.
    runs = runs_of(store, called, wanted, overrides=overrides or None)
    findings = analyse(store, runs, name=called, profile=profile)
    files = write_files(where.home_path, findings)
    if as_json:
        print_json(to_tree(findings))
    else:
        print_lines(_lines(findings, files))
    return 0


def _lines(findings: "Findings", files: "Files") -> Iterator[str]:
    """Yield the table, the sentences about it and the paths of the files."""
    from flows.miniseries.findings import HEADER, rows, sentences

    yield from columns([HEADER, *rows(findings)], right=range(1, 6))
    yield ""
    yield from sentences(findings)
    yield ""
    yield f"page     {files.page}"
    if files.picture:
        yield f"picture  {files.picture}"
    yield f"numbers  {files.numbers}"


def _command(series: "Series", overrides: Sequence[str], place: Sequence[str]) -> str:
    """Return the command that resumes the series."""
    words = ["nanochat", "miniseries", series.profile]
    words += ["--depths", ",".join(str(member.depth) for member in series.members)]
    words += [word for override in overrides for word in ("--set", override)]
    if series.name != default_name(series.profile, overrides=overrides):
        words += ["--name", series.name]
    return shlex.join([*words, *place])


def _parse(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--depths is {text!a}, expected numbers with commas between", hint=f"like {_EXAMPLE}"
        ) from None
