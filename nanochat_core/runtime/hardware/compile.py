"""Compilation: chains of elementwise operations into one kernel each on a GPU."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, of tensors, compiled where its first argument is on a GPU; as it is elsewhere.

    Inside a region that is being compiled anyway it is part of that.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if first.device.type == "cuda" and not torch.compiler.is_compiling():
            return _compiled(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@lru_cache(maxsize=64)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Lazily: torch's compiler takes a second to import.
    return torch.compile(function)
