"""`nanochat miniseries`: train one profile at several depths and fit a scaling law to them."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.cli.options import AsJson, PlacementOptions, ProfileName, WorkerOptions, parameter_of
from flows.cli.recipes import read_recipe
from flows.cli.train.sweep import PlanOnly, numbers_in, print_report, run_group
from flows.overrides import default_name
from flows.run_request import OVERRIDES, NamedRecipe, shared
from nanochat_core.errors import ConfigError

if TYPE_CHECKING:  # numpy and charts are slow to import, and every command imports this
    from flows.sweep.members import RunGroup

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
    plan: PlanOnly = False,
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
    chosen = None if depths is None else numbers_in(depths, "--depths", f"like {_EXAMPLE}")
    profile, recipe = read_recipe(profile, NamedRecipe(overrides=overrides, run_name=name), where)
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
    from flows.miniseries.series import open_series

    series = open_series(profile, chosen, overrides=overrides, name=name)

    def start() -> Any:
        from flows.miniseries.flow import MiniseriesRequest
        from flows.miniseries.flow import miniseries as flow
        from flows.orchestration.caller import call_flow

        return call_flow(
            flow,
            profile=series.profile,
            depths=tuple(member.depth for member in series.members),
            overrides=tuple(overrides),
            run_name=series.name,
            **shared(MiniseriesRequest, where.resolved, workers),
        )

    again = _command(series, overrides, [*where.argv, *workers.argv])
    return run_group(series, again, start, where, workers, plan=plan, as_json=as_json)


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
    from flows.miniseries.findings import analyse
    from flows.miniseries.points import depths_in, runs_of
    from flows.miniseries.report import report_of
    from flows.sweep.files import write_files

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
    report = report_of(analyse(store, runs, name=called, profile=profile))
    files = write_files(where.home_path, report)
    print_report(report, files, as_json=as_json)
    return 0


def _command(series: "RunGroup", overrides: Sequence[str], place: Sequence[str]) -> str:
    """Return the command that resumes the series."""
    words = ["nanochat", "miniseries", series.profile]
    words += ["--depths", ",".join(str(member.depth) for member in series.members)]
    words += [word for override in overrides for word in ("--set", override)]
    if series.name != default_name(series.profile, overrides=overrides):
        words += ["--name", series.name]
    return shlex.join([*words, *place])
