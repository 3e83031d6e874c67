"""`nanochat report`: fetch the report card of a profile's latest run."""

import sys
import webbrowser
from typing import Annotated

from cyclopts import Parameter

from flows.artifacts.cache import fetch
from flows.artifacts.names import open_usable
from flows.cli.options import StoreOptions
from flows.cli.output import print_line, print_warning
from flows.render.text import escaped
from flows.stages import REPORT


def report(
    profile: str,
    /,
    *,
    open_page: Annotated[bool, Parameter(name="--open")] = False,
    markdown: bool = False,
    place: StoreOptions = StoreOptions(),
) -> None:
    """Print the path of the report card: what was trained, how well it does, what it costs.

    Args:
        profile: A profile, or another name of a run.
        open_page: Open it in the browser.
        markdown: Print it as markdown instead.
    """
    store = place.open_store()
    # Fetched whole: the page is one file and opens from the cache without a network.
    manifest = open_usable(store, f"{REPORT.name}@{profile}", warn=print_warning)
    files = fetch(store, manifest, place.cache) / "files"
    if markdown:
        sys.stdout.write(escaped((files / "report.md").read_text(encoding="utf-8")))
        return
    page = files / "report.html"
    print_line(str(page))
    if open_page:
        webbrowser.open(page.as_uri())
