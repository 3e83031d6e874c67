"""Compilation: chains of elementwise operations into one kernel each on a GPU."""

from collections.abc import Callable
from functools import lru_cache, wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_SHAPES = 256  # of one function, as many as torch allows with all its variants


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, of tensors, compiled where its first argument is on a GPU; as it is elsewhere.

    Inside a region that is being compiled anyway it is part of that.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if first.device.type == "cuda" and not torch.compiler.is_compiling():
            strict = torch.are_deterministic_algorithms_enabled()
            return _compiled(function, strict)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def scalars(device: torch.device, *values: float) -> tuple[float | torch.Tensor, ...]:
    """Return numbers that change from call to call in the form that `fused` functions take them.

    On a GPU as tensors: with `determinism=strict` a function would be compiled for each number.
    """
    if device.type != "cuda":
        return values
    return tuple(torch.full((), value, device=device) for value in values)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function compiled by torch; under `determinism=strict` for each shape by itself.

    By default the second shape of a function gives one kernel for all shapes, which may sum in
    another order than a kernel for that shape alone. A training that resumes does not see the
    shapes that came before its checkpoint, so it would continue with other kernels.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return torch.compile(function)
    return compiled_by_shape(function)


def autotuning(precision: str) -> dict[str, bool]:
    """Return torch.compile's options with which the compiler times several kernels a product.

    But in fp8 it also tries what follows a product inside the product's kernel.
    """
    # The first two are torch's mode "max-autotune-no-cudagraphs". The third, off by default in
    # torch 2.11, adds the only products in Triton that load as cuBLAS's do.
    options = {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "triton.enable_persistent_tma_matmul": True,
    }
    if precision != "fp8":
        # Otherwise the compiler finds that a product and the views of it share no memory. In fp8,
        # where it has no fused product to offer, casts would fuse less: 8 % more bytes.
        options["loop_ordering_after_fusion"] = False
    return options


def compiled_by_shape(
    function: Callable[P, R], options: dict[str, bool] | None = None
) -> Callable[P, R]:
    """Return the function compiled by torch for each shape by itself; options: torch.compile's."""
    # Beyond the limit nothing is compiled: which shapes that hits would depend on the past, too.
    limit: dict[str, Any] = {"recompile_limit": _SHAPES}
    if limit.keys() - signature(torch.compile).parameters.keys():
        from torch._dynamo import config

        config.recompile_limit, limit = _SHAPES, {}  # torch 2.11 has one limit for all functions
    return torch.compile(function, dynamic=False, options={**options} if options else None, **limit)


@lru_cache(maxsize=64)
def _compiled(function: Callable[..., Any], strict: bool) -> Callable[..., Any]:
    # Lazily: torch's compiler takes a second to import. `strict` is what `compiled` will find.
    return compiled(function)
