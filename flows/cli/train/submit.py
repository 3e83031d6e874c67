"""For `nanochat run --submit`: have a worker run a profile, as the form in Prefect's pages does."""

import shlex
import time
from dataclasses import fields, replace
from typing import Any

from flows.artifacts.runs import new_run_id, timestamp
from flows.cli.options import StoreOptions
from flows.cli.output import print_lines
from flows.overrides import check_name_of
from flows.run_request import RunRequest
from infra.prefect import flow_runs

DEPLOYMENT = "nanochat/nanochat"


def submit_run(request: RunRequest, place: StoreOptions) -> None:
    """Create a flow run for the request, and print how to follow it."""
    # The store as it was given: without one the worker takes its own.
    request = replace(request, store=place.store)
    # Before the server is asked: a mistake would otherwise fail the run, later and elsewhere.
    name = check_name_of(request)  # refuses wrong settings too
    if place.store is not None:
        # Contacts nothing: a worker may reach a store that this machine cannot.
        place.open_store()
    api_url = flow_runs.running_server(place.home_path)
    run = new_run_id(name, timestamp(time.time()))
    flow_run = flow_runs.submit(api_url, DEPLOYMENT, parameters_of(request), name=run)
    words = StoreOptions(home=place.home, store=place.store).argv
    status = shlex.join(["nanochat", "status", run, *words])
    print_lines(
        [
            f"run      {run}",
            f"Prefect  {flow_runs.page_of(api_url.removesuffix('/api'), flow_run)}",
            f"status   {status}",
        ]
    )


def parameters_of(request: RunRequest) -> dict[str, Any]:
    """Return the parameters of a flow run: the profile, and what differs from the default."""
    values = {item.name: getattr(request, item.name) for item in fields(request)}
    defaults = {item.name: item.default for item in fields(request)}
    return {n: value for n, value in values.items() if n == "profile" or value != defaults[n]}
