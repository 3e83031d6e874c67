"""`nanochat plan`: show what a run would do, and why."""

import sys

from flows.cli.options import AsJson, PlacementOptions, ProfileName, RunOptions, pinned_profile
from flows.cli.output import print_plan, print_unread, print_warning
from flows.plan.pinned import open_pinned
from flows.plan.plan import make_plan
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
    store = where.open_store()
    pinned = open_pinned(store, what.uses, warn=print_warning)
    chosen, _ = pinned_profile(profile, what, where.home_path, plan=True, pinned=pinned)
    # The plan needs a placement for its estimates of time and cost only.
    placement = where.placement(chosen)
    planned = make_plan(chosen.run, store, where.work, pinned=pinned, placement=placement)
    print_unread(planned.unread)
    if as_json:
        sys.stdout.write(to_json(planned) + "\n")
    else:
        print_plan(render(planned))
    return planned.exit_code
