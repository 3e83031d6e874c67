"""`nanochat config`: print the settings of a profile, as a file that can be edited and run."""

import sys

from flows.cli.options import AsJson, DepthFlag, PlacementOptions, ProfileName, SetFlag
from flows.cli.output import print_json
from flows.cli.requests import read_request
from flows.profile_file import resolved_settings, to_toml


def config(
    profile: ProfileName,
    /,
    *,
    depth: DepthFlag = None,
    overrides: SetFlag = (),
    as_json: AsJson = False,
) -> int:
    """Print every setting of a profile as TOML: edit a copy, then run it like a profile.

    `nanochat config tiny > my.toml`, then `nanochat run my.toml`.
    """
    request = read_request(profile, PlacementOptions(), depth=depth, overrides=overrides)
    if as_json:
        settings = resolved_settings(request)
        head = {"profile": request.profile, "name": request.run_name, "depth": request.depth}
        print_json({**head, "settings": settings})
    else:
        sys.stdout.write(to_toml(request))
    return 0
