"""`nanochat config`: list the profiles, or print the settings of one as a file to edit and run."""

import inspect
import sys
from typing import Annotated, Any

from flows.cli.options import AsJson, DepthFlag, PlacementOptions, SetFlag, parameter_of
from flows.cli.output import aligned, print_json, print_result
from flows.cli.requests import read_request
from flows.profile_file import resolved_settings, to_toml
from flows.profiles import PROFILES, open_profile
from flows.render.text import count
from flows.run_request import PROFILE
from nanochat_core import scaling

_SIZES = ("depth", "parameters", "tokens")


def config(
    profile: Annotated[str | None, parameter_of(PROFILE)] = None,
    /,
    *,
    depth: DepthFlag = None,
    overrides: SetFlag = (),
    as_json: AsJson = False,
) -> int:
    """Print every setting of a profile as TOML: edit a copy, then run it like a profile.

    `nanochat config tiny > my.toml`, then `nanochat run my.toml`. Without PROFILE: list what can be
    trained, and how large it is.
    """
    if profile is None:
        found = [_describe(name) for name in PROFILES]
        rows = [
            (each["profile"], *(count(each[size]) for size in _SIZES), each["about"])
            for each in found
        ]
        head = ("profile", *_SIZES, "what it is")
        print_result(lambda: found, aligned([head, *rows], right=(1, 2, 3)), as_json=as_json)
        return 0
    request = read_request(profile, PlacementOptions(), depth=depth, overrides=overrides)
    if as_json:
        settings = resolved_settings(request)
        head = {"profile": request.profile, "name": request.run_name, "depth": request.depth}
        print_json({**head, "settings": settings})
    else:
        sys.stdout.write(to_toml(request))
    return 0


def _describe(name: str) -> dict[str, Any]:
    run = open_profile(name, snapshots=False).run
    return {
        "profile": name,
        "depth": run.model.depth,
        "parameters": scaling.num_params(run.model, run.numerics),
        "tokens": run.pretrain.num_steps * run.pretrain.total_batch_size,
        # The docstring of the function that makes the profile, on one line.
        "about": " ".join((inspect.getdoc(PROFILES[name]) or "").split()),
    }
