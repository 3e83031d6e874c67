"""`nanochat config`: list the profiles, or print the settings of one as a file to edit and run."""

import inspect
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from flows.cli.options import AsJson, DepthFlag, PlacementOptions, SetFlag, parameter_of
from flows.cli.output import print_json, print_result
from flows.cli.requests import read_request
from flows.profile_file import resolved_settings, to_toml
from flows.profiles import PROFILES, open_profile
from flows.render.table import Table, numbers, texts
from flows.render.text import count, size
from flows.run_request import PROFILE
from infra.placement import count_gpus, gpu_name
from nanochat_core import scaling
from nanochat_core.roofline import training_bytes
from nanochat_core.runtime.hardware.gpu_specs import find_gpu_spec

_SIZES = ("depth", "parameters", "tokens")
_RESERVED = 0.9  # the share of a card's memory that a run may plan with; CUDA takes the rest


def config(
    profile: Annotated[str | None, parameter_of(PROFILE)] = None,
    /,
    *,
    depth: DepthFlag = None,
    overrides: SetFlag = (),
    as_json: AsJson = False,
) -> None:
    """Print every setting of a profile as TOML: edit a copy, then run it like a profile.

    `nanochat config tiny > my.toml`, then `nanochat run my.toml`. Without PROFILE: list what can be
    trained, how large it is, and whether this machine can.
    """
    if profile is None:
        found = [_describe(name) for name in PROFILES]
        rows = [
            (each["profile"], *(count(each[name]) for name in _SIZES), _fits(each), each["about"])
            for each in found
        ]
        columns = (*texts("profile"), *numbers(*_SIZES), *texts("this machine", "what it is"))
        print_result(lambda: found, [Table(columns=columns, rows=rows)], as_json=as_json)
        return
    request = read_request(profile, PlacementOptions(), depth=depth, overrides=overrides)
    if as_json:
        settings = resolved_settings(request)
        head = {"profile": request.profile, "name": request.run_name, "depth": request.depth}
        print_json({**head, "settings": settings})
    else:
        sys.stdout.write(to_toml(request))


def _fits(profile: Mapping[str, Any]) -> str:
    """Return whether this machine can train a profile, in two or three words."""
    if profile["fits"] is None:
        return f"needs {size(round(profile['training_bytes']))}"
    return "fits" if profile["fits"] else "too large" if count_gpus() else "needs a GPU"


def _describe(name: str) -> dict[str, Any]:
    profile = open_profile(name, snapshots=False)
    run = profile.run
    gpu, gpus = find_gpu_spec(gpu_name() or ""), min(count_gpus(), profile.pace.max_gpus)
    needed = training_bytes(run, max(gpus, 1))
    fits: bool | None = None if gpu is None else needed <= _RESERVED * gpu.memory
    return {
        "profile": name,
        "depth": run.model.depth,
        "parameters": scaling.num_params(run.model, run.numerics),
        "tokens": run.pretrain.num_steps * run.pretrain.total_batch_size,
        "training_bytes": needed,
        # On a CPU only a model of fp32, which is small. None: the machine's GPU is not known.
        "fits": run.numerics.precision == "fp32" or (fits if gpus else False),
        # The docstring of the function that makes the profile, on one line.
        "about": " ".join((inspect.getdoc(PROFILES[name]) or "").split()),
    }
