"""`nanochat submit`: have a worker run a profile, as the form in Prefect's pages does."""

import shlex
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from flows.artifacts.runs import find_run, new_run_id, timestamp
from flows.cli.options import (
    ProfileName,
    RunOptions,
    StoreOptions,
    check_workers,
)
from flows.cli.output import print_error, print_lines, print_note
from flows.cli.requests import read_request
from flows.overrides import check_name_of
from flows.render.text import one_line
from flows.run_request import RunRequest
from infra.polling import ASK_SECONDS
from infra.retry import NoAnswer, until_answered
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, StoreError

DEPLOYMENT = "nanochat/nanochat"


def submit(
    profile: ProfileName,
    /,
    *,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
    watch: Annotated[
        bool, Parameter(negative="", help="Wait for the end of the run, and print what it makes.")
    ] = False,
) -> int:
    """Have a worker run a profile, and return at once; `nanochat up` starts server and workers.

    The options are those of `nanochat run`. What is not given is as in the form of Prefect's pages:
    the worker's own store, and the pool gpu for GPU stages. Ctrl-C ends the watching, not the run.
    """
    # The store as it was given: without one the worker takes its own.
    request = replace(read_request(profile, options), store=options.store)
    # Before the server is asked: a mistake would otherwise fail the run, later and elsewhere.
    check_workers(request)
    name = check_name_of(request)  # refuses wrong settings too
    if watch or options.store is not None:
        # Contacts nothing: a worker may reach a store that this machine cannot.
        options.open_store()
    from infra.prefect import flow_runs

    api_url = flow_runs.running_server(options.home_path)
    run = new_run_id(name, timestamp(time.time()))
    flow_run = flow_runs.submit(api_url, DEPLOYMENT, parameters_of(request), name=run)
    words = StoreOptions(home=options.home, store=options.store).argv
    print_lines(
        [
            f"run      {run}",
            f"Prefect  {flow_runs.page_of(api_url.removesuffix('/api'), flow_run)}",
            f"status   {shlex.join(['nanochat', 'status', run, *words])}",
        ]
    )
    return _watch(api_url, flow_run, run, options.open_store()) if watch else 0


def parameters_of(request: RunRequest) -> dict[str, Any]:
    """Return the parameters of a flow run: the profile, and what differs from the default."""
    values = {item.name: getattr(request, item.name) for item in fields(request)}
    defaults = {item.name: item.default for item in fields(request)}
    return {n: value for n, value in values.items() if n == "profile" or value != defaults[n]}


def _watch(api_url: str, flow_run: str, run: str, store: Store) -> int:
    """Print states and finished stages of a flow run until it ends; return the exit code."""
    from infra.prefect import flow_runs

    shown: set[str] = set()
    state = ""

    def report(failure: NoAnswer) -> None:
        if failure.tries == 1:
            print_note(f"{failure.error}; the run is not affected, and watching continues")

    read = partial(flow_runs.read_flow_run, api_url, flow_run, run=run)
    try:
        while True:
            found = until_answered(read, flow_runs.NoAnswerError, on_failure=report)
            if found.state != state:
                state = found.state
                print_lines([f"{state.lower():<10}  {found.name}"])
            print_lines(_made(store, run, shown))
            if not found.is_live:
                break
            time.sleep(ASK_SECONDS)
    except KeyboardInterrupt:
        print_note("the run continues; Prefect's pages can cancel it")
        raise
    if found.type == "COMPLETED":
        return 0
    error, _, hint = found.message.partition("\nhint: ")
    print_error(one_line(error) or f"the run ended as {state.lower()}", hint=hint or None)
    return 1


def _made(store: Store, run: str, shown: set[str]) -> Iterator[str]:
    """Yield a line for each artifact that the run's record has, and `shown` has not."""
    try:
        record = find_run(store, run)
    except (StoreError, ArtifactError):  # looked at again
        return
    for ref in record.refs if record else ():
        if ref.stage not in shown:
            shown.add(ref.stage)
            yield f"{'done':<10}  {ref.name}"
