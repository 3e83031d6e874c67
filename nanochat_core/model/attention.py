"""Causal attention inside a sliding window, and the choice of the backend that computes it.

A window of W lets the query at position t see the keys t-W..t: W to its left and itself, W+1 keys.
Backends that count keys rather than distance need W+1. The backend is chosen once, the same for all
ranks. It never changes a result beyond rounding, so it is recorded but is part of no fingerprint.
Decoding has its own attention, see engine/.

Shapes: B rows, T tokens, H query heads, K key/value heads, D head dim.
"""

import torch
from torch import Tensor

from nanochat_core.errors import ConfigError
from nanochat_core.model.attention_backends import BACKENDS, SDPA, Backend, Call, preferred
from nanochat_core.runtime.hardware.distributed import ALONE, World

_chosen: Backend = SDPA
_call: Call = SDPA.load()


def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """Compute attention within whole rows: q (B, T, H, D), k, v (B, T, K, D) -> like q."""
    # T - 1 already hides nothing. One value for all such windows means one cached mask or plan.
    return _call(q, k, v, min(window, q.size(1) - 1))


def choose(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    strict: bool = False,
    world: World = ALONE,
) -> Backend:
    """Choose the backend of every rank: by name, or with "auto" the first that runs on all.

    `dtype` is that of q, k and v. A backend qualifies if its forward and backward pass agree with
    SDPA's; under `strict` its gradients must also be bitwise reproducible. Collective. Raises
    ConfigError, on every rank, if the name is unknown or its backend cannot run on one of them.
    """
    global _chosen, _call
    names = [backend.name for backend in BACKENDS]
    if name not in ("auto", *names):
        raise ConfigError(
            f"there is no attention backend '{name}'", hint=f"one of: auto, {', '.join(names)}"
        )
    reason: str | None = None
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    major = torch.cuda.get_device_capability(device)[0] if on_gpu else None
    for backend in preferred(BACKENDS, major):
        if name in ("auto", backend.name):
            fault = backend.unable(device, dtype, strict=strict)
            if fault is not None and world.size > 1:
                fault = f"{fault} (rank {world.rank})"
            # One rank's fault excludes the backend on every rank, so that all compute alike.
            reason = world.first_text(fault)
            if reason is None:
                _chosen, _call = backend, backend.load()
                return backend
    raise ConfigError(
        f"attention backend '{name}' cannot run here: {reason}",
        hint='use "auto", or "sdpa", which runs everywhere',
    )


def attention_backend() -> str:
    """Return the name of the backend in use: "sdpa" until one is chosen."""
    return _chosen.name
