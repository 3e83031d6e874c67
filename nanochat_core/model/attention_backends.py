"""Attention backends: whether each can run here, and its call.

Every call takes q (B, T, H, D), k and v (B, T, K, D) and a window below T, and returns q's shape. A
backend's package is imported when the backend is loaded. SDPA is always available and is the
reference for the others. On an H100 `cudnn`, `flex` and `varlen` agree with it, forward and
backward; FlashAttention's packages are written to their documented interfaces and no GPU has run
them. On a CPU only FlexAttention's forward pass is tested (it has no backward pass there).
`Backend.unable` detects a backend that cannot run or computes something else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.errors import first_line
from nanochat_core.model.attention_cudnn import attention as cudnn_attention
from nanochat_core.model.attention_cudnn import frontend
from nanochat_core.runtime.hardware.compile import compiled

Call: TypeAlias = Callable[[Tensor, Tensor, Tensor, int], Tensor]

HALF_DTYPES = (torch.bfloat16, torch.float16)
CPU_BLOCK = 64  # queries
_FROM_AMPERE = (8, 9, 10, 11, 12)  # major compute capabilities
MISSING = "its package is missing"
TOLERANCE = 0.03  # relative to the largest value; bf16 rounds each value by up to 0.004 of it


@dataclass(frozen=True)
class Backend:
    """One way to compute attention."""

    name: str
    capabilities: tuple[int, ...]  # major compute capabilities of GPUs it runs on; (): any device
    load: Callable[[], Call]  # imports its package
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES
    written_for: tuple[int, ...] = ()  # GPUs on which "auto" prefers it
    repeats: bool = False  # whether the same input always gives the same gradients, to the bit

    def unable(
        self, device: torch.device, dtype: torch.dtype, *, strict: bool = False
    ) -> str | None:
        """Return why it cannot train here on q, k, v of this dtype. None means it can.

        `strict` requires bitwise reproducible gradients.
        """
        if strict and not self.repeats:
            return "determinism=strict, and its gradients add up in an order that varies"
        if self.capabilities:
            if device.type != "cuda":
                return f"it needs a GPU, and the device is {device.type}"
            major, minor = torch.cuda.get_device_capability(device)
            if major not in self.capabilities:
                majors = ", ".join(f"{m}.x" for m in self.capabilities)
                return f"it is for compute capability {majors}, this GPU has {major}.{minor}"
        if dtype not in self.dtypes:
            return f"it does not compute in {str(dtype).removeprefix('torch.')}"
        return None if self is SDPA else self._fault(device, dtype)

    def _fault(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return how it fails on a small problem or differs from SDPA. None means no fault."""
        try:
            return difference(self.load(), device, dtype)
        except ImportError as error:
            return f"{MISSING}: {error}"
        except Exception as error:  # noqa: BLE001 - third-party kernels on unknown machines: any
            # failure means that the backend is not used, and the reason is reported.
            return f"{type(error).__name__} on a small problem: {first_line(error)}"


def difference(call: Call, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return where a call deviates from SDPA, forward or backward. None means it agrees."""
    # A window off by one, a multiple of a kernel's block, and one that hides nothing (T - 1): the
    # cases where backends that count keys differently disagree.
    generator = torch.Generator().manual_seed(1)
    problem = torch.randn(4, 1, 384, 4, 128, generator=generator).to(device, dtype)
    for window in (100, 128, 383):
        results: list[list[Tensor]] = []
        for one in (call, _sdpa):
            leaves = q, k, v = [t.clone().requires_grad_() for t in problem[:3]]
            out = one(q, k, v, window)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, problem[3])])
        for name, got, expected in zip(("o", "dq", "dk", "dv"), *results, strict=True):
            error = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
            if not error <= TOLERANCE:  # true for NaN too, unlike error > TOLERANCE
                return f"its {name} at window {window} is off by {float(error):.3f}"
    return None


def mixed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Compute torch's attention: q (B, H, T, D), k, v (B, K, S, D). No mask: causal, and S = T."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.size(1) != k.size(1)
    )


def _sdpa(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    length = q.size(1)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if window >= length - 1:
        return mixed(q, k, v, None).transpose(1, 2)
    if q.device.type != "cpu":
        return mixed(q, k, v, band(length, length, window, q.device)).transpose(1, 2)
    # With a mask alone the CPU would still multiply the hidden keys: give each block of queries
    # only the keys that it can see. A split's gradient is one copy, a slice's as long as q.
    blocks: list[Tensor] = []
    for first, block in zip(range(0, length, CPU_BLOCK), q.split(CPU_BLOCK, dim=2), strict=True):
        last = first + block.size(2)
        keys = slice(max(0, first - window), last)
        mask = band(last - first, keys.stop - keys.start, window, q.device)
        blocks.append(mixed(block, k[:, :, keys], v[:, :, keys], mask))
    return torch.cat(blocks, dim=2).transpose(1, 2)


@lru_cache(maxsize=32)
def band(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """Return which keys each query sees, the last query aligned with the last key: (T, S) bool."""
    # A tensor created in inference mode cannot be used by autograd, and this one is cached.
    with torch.inference_mode(False):
        keys = torch.arange(num_keys, device=device)
        distance = keys[num_keys - num_queries :].unsqueeze(1) - keys
        return (distance >= 0) & (distance <= window)


def _load_flash(name: str) -> Call:
    """Return FlashAttention's call, whose versions agree in their arguments."""
    # Written-out imports, which a stage's fingerprint can follow. Not through packages that
    # download the kernel: a stage that holds a GPU uses no network.
    unlimited: int | None = -1  # for "no window"
    if name == "fa2":
        from flash_attn import flash_attn_func  # pyright: ignore
    elif name == "fa3":
        from flash_attn_interface import flash_attn_func  # pyright: ignore
    else:
        from flash_attn.cute import flash_attn_func  # pyright: ignore

        # torch.compile cannot trace it: FA4's kernels come from a compiler of their own.
        flash_attn_func, unlimited = torch.compiler.disable(flash_attn_func), None
    attention: Any = flash_attn_func

    # Its window counts the keys to the left without the query's own, as ours does: no W + 1 here.
    def call(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        size = (window, 0) if window < q.size(1) - 1 else (unlimited, unlimited)
        result = attention(q, k, v, causal=True, window_size=size)
        # Some versions return the log-sum-exp along with the output.
        return result[0] if isinstance(result, tuple) else result

    return call


def load_varlen() -> Call:
    """Return torch's own FlashAttention 2, by its call for sequences of different lengths: the only
    one that takes a window."""
    from torch.nn.attention.varlen import varlen_attn

    def call(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        rows, length = q.shape[:2]
        ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=q.device)
        if q.size(2) != k.size(2):  # varlen_attn of torch 2.11 has no groups of query heads
            k, v = (t.repeat_interleave(q.size(2) // k.size(2), dim=2) for t in (k, v))
        mixed = varlen_attn(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            ends,
            ends,
            length,
            length,
            window_size=(window if window < length - 1 else -1, 0),
        )
        assert isinstance(mixed, Tensor)  # a tuple only with `return_aux`
        return mixed.unflatten(0, (rows, length))

    return call


def _load_cudnn() -> Call:
    frontend()
    return cudnn_attention


def load_flex() -> Call:
    """Return FlexAttention, compiled on a GPU; on a CPU as plain operations, without backward."""
    from torch.nn.attention.flex_attention import flex_attention

    by_compiler = compiled(flex_attention)

    def call(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        # Inside a compiled model it must not be compiled a second time.
        inside = torch.compiler.is_compiling() or q.device.type == "cpu"
        flex: Callable[..., Any] = flex_attention if inside else by_compiler
        mask = _block_mask(q.size(1), window, q.device)
        mixed = flex(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            block_mask=mask,
            enable_gqa=q.size(2) != k.size(2),
        )
        return mixed.transpose(1, 2)

    return call


@lru_cache(maxsize=16)
def _block_mask(length: int, window: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key <= window)

    # Cached, so it must not become an inference tensor; see `band`.
    with torch.inference_mode(False):
        return create_block_mask(visible, None, None, length, length, device=str(device))


# FlashAttention and cuDNN accumulate dq by atomic additions, whose order varies; some have a
# deterministic option, which has not been tried. FlexAttention's backward pass runs one program per
# block of queries and one per block of keys, and no two of them add to the same output.
SDPA = Backend(
    "sdpa", (), lambda: _sdpa, (torch.float32, torch.float64, *HALF_DTYPES), repeats=True
)
# In the order of preference of "auto", but see `preferred`.
BACKENDS = (
    Backend("fa3", (9,), partial(_load_flash, "fa3"), written_for=(9,)),
    Backend("cudnn", (9, 10), _load_cudnn),
    Backend("fa4", (9, 10, 11, 12), partial(_load_flash, "fa4"), written_for=(10, 11, 12)),
    Backend("flex", _FROM_AMPERE, load_flex, repeats=True),
    Backend("fa2", _FROM_AMPERE, partial(_load_flash, "fa2"), written_for=(8,)),
    Backend("varlen", _FROM_AMPERE, load_varlen, written_for=(8,)),
    SDPA,
)


def preferred(backends: Sequence[Backend], major: int | None) -> Sequence[Backend]:
    """Return the backends in the order of "auto" on a GPU of this major compute capability.

    Those that were written for it come first: FlashAttention 2 on Ampere and Ada (the package's
    before torch's own, which is older), 3 on Hopper, 4 on Blackwell. None: there is no GPU.
    """
    return sorted(backends, key=lambda backend: major not in backend.written_for)
