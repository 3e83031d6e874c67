"""Flows of one request: Prefect calls them with the request's fields, and shows these as a form."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Annotated, Any, TypeVar

from flows.run_request import options_of, request_of

# What most people fill in: a form begins with these. The others follow in the order of the groups.
FIRST = ("model", "profile", "depth", "run_name", "vary", "seeds", "overrides")

R = TypeVar("R")
Request = TypeVar("Request")


def takes(
    kind: type[Request], *, with_rules: bool = True
) -> Callable[[Callable[[Request], R]], Callable[..., R]]:
    """Make a function of one request into one that takes the fields of `kind` by name.

    Without rules only types are checked: for parameters that other flows set, and no person.
    """

    def wrap(function: Callable[[Request], R]) -> Callable[..., R]:
        @functools.wraps(function)
        def body(**parameters: Any) -> R:
            return function(request_of(kind, parameters))

        # Prefect reads names, order, types and defaults from here, and makes the form of them.
        setattr(body, "__signature__", _signature_of(kind, with_rules))  # noqa: B010 - no attribute by type
        return body

    return wrap


def _signature_of(request: type[Any], with_rules: bool) -> inspect.Signature:
    defaults = {item.name: item.default for item in fields(request)}
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=empty if defaults[name] is MISSING else defaults[name],
                annotation=Annotated[kind, replace(option, binds=with_rules)],
            )
            for name, (kind, option) in sorted(
                options_of(request).items(),
                key=lambda item: FIRST.index(item[0]) if item[0] in FIRST else len(FIRST),
            )
        ]
    )
