"""`nanochat plan`: show what a run would do, and why; also of one stage."""

import json
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import CHANGES, AsJson, ExitCode, ProfileName, RunOptions
from flows.cli.output import print_json, print_lines, print_unread
from flows.cli.requests import plan_request, read_request
from flows.cli.train.plan_stage import print_stage
from flows.plan.render import render, to_json


def plan(
    profile: ProfileName,
    stage: Annotated[
        str | None,
        Parameter(help="Show this stage alone: its reason, inputs, artifact and executions."),
    ] = None,
    /,
    *,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
    exit_code: ExitCode = False,
    as_json: AsJson = False,
) -> int:
    """Show what a run would do, stage by stage, and why. Computes nothing.

    With --exit-code it exits with 3 when there is something to run, with STAGE when that stage has
    to be built.
    """
    request = read_request(profile, options)
    if stage is not None:
        from flows.artifacts.names import check_stage  # most plans are of all stages

        check_stage(stage)
    found = plan_request(request, options)
    planned, name, profile = found.plan, found.name, found.request.profile
    print_unread(planned.unread)
    item = None if stage is None else planned.of(stage)
    up_to_date = planned.up_to_date if item is None else item.state == "="
    code = CHANGES if exit_code and not up_to_date else 0
    if item is not None:
        print_stage(found, item, as_json=as_json)
        return code
    if as_json:
        settings = [asdict(setting) for setting in found.settings]
        print_json({"run_name": name, "settings": settings, **json.loads(to_json(planned))})
        return code
    if name != profile or found.settings:
        print_lines([f"run {name}", *(f"  {setting}" for setting in found.settings), ""])
    print_lines(render(planned, name=profile))
    return code
