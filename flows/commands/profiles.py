"""`nanochat profiles`: what can be trained."""

import inspect

from flows.commands.options import AsJson
from flows.commands.terminal import print_json, screen
from flows.profiles import PROFILES, open_profile
from nanochat_core import scaling


def profiles(*, as_json: AsJson = False) -> int:
    """List what can be trained, and how large it is."""
    from rich.table import Table

    rows = [_describe(name) for name in PROFILES]
    if as_json:
        print_json(rows)
        return 0
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("profile", style="bold", no_wrap=True)
    for title in ("depth", "parameters", "tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("what it is")
    for row in rows:
        table.add_row(
            row["profile"],
            str(row["depth"]),
            short(row["parameters"]),
            short(row["tokens"]),
            row["about"],
        )
    screen().print(table, soft_wrap=False)
    return 0


def short(number: float) -> str:
    """A count in three digits: 286261730 -> "286 M"."""
    for unit in ("", "K", "M", "B", "T"):
        if number < 999.5:
            digits = f"{number:.3g}" if number >= 1 or not unit else f"{number:.1f}"
            return f"{digits} {unit}".rstrip()
        number /= 1000
    return f"{number:.0f} P"


def _describe(name: str) -> dict[str, str | int]:
    run = open_profile(name).run
    return {
        "profile": name,
        "depth": run.model.depth,
        "parameters": scaling.num_params(run.model),
        "tokens": run.pretrain.num_steps * run.pretrain.total_batch_size,
        "about": " ".join((inspect.getdoc(PROFILES[name]) or "").split()),
    }
