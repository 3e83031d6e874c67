"""Flows of one request: Prefect calls them with the request's fields, and shows these as a form."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

from prefect import Flow, flow
from prefect.runtime import flow_run

from flows.artifacts.runs import new_run_id, timestamp
from flows.identity.ref import name_in
from flows.orchestration.caller import end_when_cancelled
from flows.orchestration.stage_task import failed
from flows.run_request import options_of, request_of
from infra.prefect.supervisor.workers import end_with_worker
from nanochat_core.errors import ConfigError, NanochatError

# What most people fill in: a form begins with these. The others follow in the order of the groups.
FIRST = ("model", "profile", "depth", "run_name", "vary", "seeds", "overrides")

R = TypeVar("R")
Request = TypeVar("Request")


def run_flow(
    name: str, kind: type[Request], *, name_of: Callable[[Request], str]
) -> Callable[[Callable[[Request], R]], Flow[..., R]]:
    """Make a function of one request the Prefect flow `name` of the request's fields.

    `name_of` returns the name of the run. Cancel ends it as Cancelled, and a NanochatError fails it
    with its line and hint alone.
    """

    def wrap(function: Callable[[Request], R]) -> Flow[..., R]:
        @functools.wraps(function)
        def body(**parameters: Any) -> R:
            end_with_worker()
            try:
                return end_when_cancelled(lambda: function(request_of(kind, parameters)))
            except NanochatError as error:
                state: Any = failed(error)  # Prefect makes a returned state the run's own
                return state

        # Prefect reads names, order, types and defaults from here, and makes the form of them.
        setattr(body, "__signature__", _signature_of(kind))  # noqa: B010 - no attribute by type
        return flow(
            name=name,
            flow_run_name=_flow_run_name(lambda given: name_of(request_of(kind, given))),
            retries=0,
            persist_result=False,
        )(body)

    return wrap


def _flow_run_name(name_of: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """Return a function for Prefect that names a flow run by the id of its run.

    The id is new, and of the name that `name_of` returns for the flow's parameters.
    """

    def name() -> str:
        given = flow_run.get_name() or ""
        # A retry keeps its name. The count is of attempts before this one: it counts itself once
        # it is running.
        if flow_run.get_run_count():
            return given
        parameters = flow_run.get_parameters()
        try:
            found = name_of(parameters)
        except ConfigError:
            # The flow raises it again and so fails; raised here it would crash without a hint.
            found = parameters.get("run_name") or parameters.get("profile") or "refused"
        # `nanochat run --submit` has given it an id already, by which its user finds it.
        return given if name_in(given) == found else new_run_id(found, timestamp(time.time()))

    return name


def _signature_of(request: type[Any]) -> inspect.Signature:
    """Return the signature of a request's constructor in the order of a form."""
    given = inspect.signature(request).parameters
    names = sorted(
        options_of(request), key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)
    )
    return inspect.Signature([given[name] for name in names])
