"""`nanochat doctor`: check this machine, and print what to do about each failure."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.cli.options import AsJson, StoreOptions
from flows.cli.output import print_json, print_lines, screen

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
    gpu: Annotated[
        bool,
        Parameter(
            negative="",
            help="Only test the GPU: what is used on it, whether it computes right, its speed, and "
            "what each profile would take; half a minute.",
        ),
    ] = False,
    card: Annotated[
        str | None,
        Parameter(
            name="--as",
            help="Only print what each profile would take on such a GPU, as h100; none is needed.",
        ),
    ] = None,
    place: StoreOptions = StoreOptions(),  # noqa: B008 - frozen
    as_json: AsJson = False,
) -> int:
    """Check Python, packages, torch, GPU, disk, store and the Prefect server.

    Every failure comes with its remedy. Exits with 1 when a run could not work.
    """
    if card is not None:
        from flows.cli.gpu import forecast, table
        from nanochat_core.roofline import named_gpu

        spec = named_gpu(card)
        if as_json:
            print_json({"gpu": spec.name, "profiles": forecast(spec)})
        else:
            print_lines(table(spec))
        return 0
    if gpu:
        return _test_gpu(as_json=as_json)
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
    return _exit_code(found)


def _test_gpu(*, as_json: bool) -> int:
    from flows.cli.gpu import check_gpu_here, forecast, measured_spec, self_test, table

    check_gpu_here()
    found: list[Finding] = []
    values: dict[str, Any] = {}
    for check, measured in self_test():
        found.append(check)
        values |= measured
        if not as_json:
            _show(check)
    spec = measured_spec(values)
    profiles = forecast(spec) if spec else []
    if as_json:
        checks = [asdict(check) for check in found]
        print_json({"gpu": values.get("gpu"), "checks": checks, "profiles": profiles})
    elif spec:
        print_lines(["", *table(spec)])
    return _exit_code(found)


def _exit_code(found: "Sequence[Finding]") -> int:
    return 1 if any(check.state == "fail" for check in found) else 0


def _show(check: "Finding") -> None:
    console = screen()
    console.print(f"{check.state:<5}", style=_STYLES[check.state], end="")
    console.print(f"{check.name:<11}{check.found}")
    if check.remedy:
        console.print(f"{'':<16}hint: {check.remedy}", style="cyan")
