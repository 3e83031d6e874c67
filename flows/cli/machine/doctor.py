"""`nanochat doctor`: check this machine, and print what to do about each failure."""

import itertools
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from flows.cli.options import AsJson, StoreOptions
from flows.cli.output import print_json, print_line, print_lines
from infra.placement import count_gpus

if TYPE_CHECKING:
    from infra.storage.s3.probe import Finding


def doctor(
    *,
    card: Annotated[str | None, Parameter(name="--as")] = None,
    place: StoreOptions = StoreOptions(),
    as_json: AsJson = False,
) -> int:
    """Check Python, packages, torch, disk, Prefect, all that a store must do, and the GPU.

    Every failure comes with its remedy. Exits with 1 when a run could not work. Where there is a
    GPU it computes half a minute, and at the end is what each profile would take on it.

    Args:
        card: Check nothing, and print what each profile would take on such a GPU, as h100.
    """
    from flows.cli.checks import examine
    from flows.cli.gpu import forecast, measured_spec, self_test, table
    from nanochat_core.roofline import named_gpu

    found: list[Finding] = []
    values: dict[str, Any] = {}
    spec = None if card is None else named_gpu(card)
    if spec is None:
        checks = ((check, dict[str, Any]()) for check in examine(place.home_path, place.store_url))
        for check, measured in itertools.chain(checks, self_test() if count_gpus() else ()):
            found.append(check)
            values |= measured
            if not as_json:
                # As it comes: importing torch and reaching a store take seconds.
                print_line(f"{check.state:<5}{check.name:<11}{check.found}", check.state)
                print_lines([f"{'':<16}hint: {check.remedy}"] if check.remedy else [])
        spec = measured_spec(values)
    if as_json:
        profiles = forecast(spec) if spec else []
        checked = [asdict(check) for check in found]
        print_json({"checks": checked, "gpu": spec and spec.name, "profiles": profiles})
    elif spec:
        print_lines([*([""] if found else []), *table(spec)])
    return 1 if any(check.state == "fail" for check in found) else 0
