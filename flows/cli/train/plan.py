"""`nanochat plan`: show what a run would do, and why."""

import sys

from flows.cli.options import AsJson, PlacementOptions, ProfileName, RunOptions, plan_profile
from flows.cli.output import print_plan, print_unread
from flows.plan.render import render, to_json


def plan(
    profile: ProfileName,
    /,
    *,
    what: RunOptions = RunOptions(),  # noqa: B008 - frozen
    where: PlacementOptions = PlacementOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Show what a run would do, stage by stage, and why. Computes nothing.

    Exits with 0 when there is nothing to run, with 2 when there is, with 1 on an error.
    """
    planned = plan_profile(profile, what, where).plan
    print_unread(planned.unread)
    if as_json:
        sys.stdout.write(to_json(planned) + "\n")
    else:
        print_plan(render(planned))
    return planned.exit_code
