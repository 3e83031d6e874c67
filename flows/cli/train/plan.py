"""`nanochat plan`: show what a run would do, and why."""

import json
from dataclasses import asdict

from flows.cli.options import (
    CHANGES,
    AsJson,
    ExitCode,
    NamedOptions,
    PlacementOptions,
    ProfileName,
    RedoOptions,
)
from flows.cli.output import (
    print_json,
    print_lines,
    print_states,
    print_unread,
    table_width,
)
from flows.cli.planning import plan_profile
from flows.cli.recipes import read_recipe
from flows.overrides import open_name
from flows.plan.render import render, to_json


def plan(
    profile: ProfileName,
    /,
    *,
    redo: RedoOptions = RedoOptions(),  # noqa: B008 - frozen
    what: NamedOptions = NamedOptions(),  # noqa: B008 - frozen
    where: PlacementOptions = PlacementOptions(),  # noqa: B008 - frozen
    exit_code: ExitCode = False,
    as_json: AsJson = False,
) -> int:
    """Show what a run would do, stage by stage, and why. Computes nothing.

    With --exit-code it exits with 3 when there is something to run.
    """
    profile, what = read_recipe(profile, what, where)
    found = plan_profile(profile, what, where, redo=redo)
    name = open_name(found.store, profile, what)
    planned = found.plan
    print_unread(planned.unread)
    code = CHANGES if exit_code and not planned.up_to_date else 0
    if as_json:
        settings = [asdict(setting) for setting in found.settings]
        print_json({"run_name": name, "settings": settings, **json.loads(to_json(planned))})
        return code
    if name != profile or found.settings:
        print_lines([f"run {name}", *(f"  {setting}" for setting in found.settings), ""])
    print_states(render(planned, name=profile, width=table_width()))
    return code
