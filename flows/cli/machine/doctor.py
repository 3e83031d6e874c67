"""`nanochat doctor`: check this machine, and print what to do about each failure."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from flows.cli.options import AsJson, StoreOptions
from flows.cli.output import print_json, screen

if TYPE_CHECKING:
    from infra.storage.s3.probe import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    *,
    probe_store: Annotated[
        bool,
        Parameter(
            negative="",
            help="Only try out the store, and all that is needed of one; takes seconds to minutes.",
        ),
    ] = False,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Check Python, packages, torch, GPU, disk, store and the Prefect server.

    Every failure comes with its remedy. Exits with 1 when a run could not work.
    """
    from flows.cli.checks import examine, try_store

    if probe_store:
        checks = try_store(place.store_url)
    else:
        checks = examine(home=place.home_path, store=place.store_url)
    found: list[Finding] = []
    for check in checks:
        found.append(check)
        if not as_json:
            _show(check)  # as it comes: importing torch and reaching a store take seconds
    if as_json:
        print_json([asdict(check) for check in found])
    return 1 if any(check.state == "fail" for check in found) else 0


def _show(check: "Finding") -> None:
    console = screen()
    console.print(f"{check.state:<5}", style=_STYLES[check.state], end="")
    console.print(f"{check.name:<11}{check.found}")
    if check.remedy:
        console.print(f"{'':<16}hint: {check.remedy}", style="cyan")
