"""`nanochat profiles`: list the profiles with their sizes."""

import inspect
from typing import Any

from flows.cli.options import AsJson
from flows.cli.output import print_json, screen
from flows.profiles import PROFILES, open_profile
from flows.render.text import count
from nanochat_core import scaling


def profiles(*, as_json: AsJson = False) -> int:
    """List what can be trained, and how large it is."""
    found = [_describe(name) for name in PROFILES]
    if as_json:
        print_json(found)
        return 0
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("profile", style="bold", no_wrap=True)
    for title in ("depth", "parameters", "tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("what it is")
    for item in found:
        sizes = (count(item["parameters"]), count(item["tokens"]))
        table.add_row(item["profile"], str(item["depth"]), *sizes, item["about"])
    screen(soft_wrap=False).print(table)
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
