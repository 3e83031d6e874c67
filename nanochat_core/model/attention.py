"""Causal attention inside a sliding window, what precedes it, and the choice of what computes both.

A window of W lets the query at position t see the keys t-W..t: W to its left and itself, W+1 keys.
Backends that count keys rather than distance need W+1. The backend is chosen once, the same for all
ranks. It never changes a result beyond rounding, so it is recorded but is part of no fingerprint.
Decoding has its own attention, see engine/.

Shapes: B rows, T tokens, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from nanochat_core.errors import ConfigError
from nanochat_core.model.attention_backends import BACKENDS, SDPA, Backend, Call, preferred
from nanochat_core.model.layers import Rotary, rms_norm, rotate
from nanochat_core.model.native import rows
from nanochat_core.runtime.hardware.distributed import ALONE, World

KERNEL_TOLERANCE = 0.02  # of the largest value, by which our kernel may differ in bf16

_chosen: Backend = SDPA
_call: Call = SDPA.load()
_qk_kernel: Callable[[Tensor, Tensor, Tensor, float, float], Tensor] | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """Compute attention within whole rows: q (B, T, H, D), k, v (B, T, K, D) -> like q."""
    # T - 1 already hides nothing. One value for all such windows means one cached mask or plan.
    return _call(q, k, v, min(window, q.size(1) - 1))


def rotate_normalise(x: Tensor, rotary: Rotary, eps: float, scale: float) -> Tensor:
    """Apply rotary positions to q or k (B, T, H, D), then normalise each head to `scale`."""
    if _qk_kernel is not None:
        return _qk_kernel(x, *rotary, eps, scale)
    cos, sin = rotary
    if cos.shape == (1, x.size(1), 1, x.size(3) // 2) and rows.usable(x, cos, sin):
        return rows.rotate_normalise(x, cos, sin, eps, scale)
    x = rms_norm(rotate(x, rotary), eps)
    return x if scale == 1.0 else x * scale


def choose_qk_kernel(wanted: bool, device: torch.device, head_dim: int) -> None:
    """Choose what `rotate_normalise` runs: our Triton kernel if it is `wanted`, else torch.

    Raises ConfigError if the kernel cannot run on this device, or differs from torch there.
    """
    global _qk_kernel
    _qk_kernel = None
    if not wanted:
        return
    fault = None
    if device.type != "cuda" or find_spec("triton") is None:
        fault = f"it needs a GPU and the package triton, and the device is {device.type}"
    elif head_dim & (head_dim - 1):
        fault = f"it needs heads of 2^n channels, and these have {head_dim}"
    else:
        from nanochat_core.model.qk_kernel import error, rotate_normalise

        if not (found := error(device, head_dim)) <= KERNEL_TOLERANCE:
            fault = f"it differs from torch by {found:.1e} of the largest value"
        _qk_kernel = rotate_normalise
    if fault is not None:
        _qk_kernel = None
        raise ConfigError(f"the QK kernel cannot run here: {fault}", hint="--place qk_kernel=false")


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
