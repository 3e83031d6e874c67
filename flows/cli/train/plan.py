"""`nanochat plan`: show what a run would do, and why."""

import json
from dataclasses import asdict

from flows.cli.options import (
    CHANGES,
    AsJson,
    ExitCode,
    ProfileName,
    RunOptions,
)
from flows.cli.output import (
    print_json,
    print_lines,
    print_states,
    print_unread,
    table_width,
)
from flows.cli.requests import plan_request, read_request
from flows.plan.render import render, to_json


def plan(
    profile: ProfileName,
    /,
    *,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
    exit_code: ExitCode = False,
    as_json: AsJson = False,
) -> int:
    """Show what a run would do, stage by stage, and why. Computes nothing.

    With --exit-code it exits with 3 when there is something to run.
    """
    found = plan_request(read_request(profile, options), options)
    planned, name, profile = found.plan, found.name, found.request.profile
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
