"""What this GPU can do at best: copying, reading, and every matrix product of a training step.

python -m bench.gpu.probe --device cuda
"""

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
from torch import Tensor

from bench.gpu.nvml import find_gpu
from bench.gpu.report import needs_gpu, result, say, wait_turn
from nanochat_core.model.attention_backends import BACKENDS
from nanochat_core.model.fp8 import E4M3
from nanochat_core.scaling import model_for_depth
from nanochat_core.self_test import best_seconds

ROWS = 32768  # of a product: 16 rows of 2048 tokens
BLOCK = 8192  # of lm_head's, in which our loss computes at a vocabulary of 32,768
COPIED = 2**31  # bytes
SQUARE = 8192
PACKAGES = ("torch", "triton", "nvidia-cudnn-frontend", "flash-attn", "numpy")


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    report_machine(device)
    wait_turn()
    on_gpu = device.type == "cuda"
    bandwidths(COPIED if on_gpu else 2**18, device)
    square = SQUARE if on_gpu else 64
    product("square", square, square, square, device)
    for depth in (12, 24) if on_gpu else (1,):
        of_training(depth, device, small=not on_gpu)
    if not on_gpu:
        needs_gpu("bandwidth and FLOP/s of a GPU")


def report_machine(device: torch.device) -> None:
    """Report the device, its libraries, and which attention backends can train on it."""
    found: dict[str, object] = {"python": sys.version.split()[0], "packages": versions()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = find_gpu()
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "gigabytes": round(properties.total_memory / 1e9, 1),
            "driver": gpu.driver if gpu else None,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        reasons = {b.name: b.unable(device, torch.bfloat16) for b in BACKENDS}
        found["attention"] = {name: reason or "can train" for name, reason in reasons.items()}
    result("machine", **found)
    for name, value in found.items():
        say(f"{name}: {value}")


def versions() -> dict[str, str | None]:
    """Return the versions of packages that matter; None: not installed."""
    found: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def bandwidths(size: int, device: torch.device) -> None:
    """Report the rates of copying and of reading `size` bytes."""
    numbers = torch.ones(size // 4, device=device)
    target = torch.empty_like(numbers)
    bandwidth("copy", lambda: target.copy_(numbers), 2 * size)
    bandwidth("read", lambda: numbers.sum(), size)


def bandwidth(name: str, once: Callable[[], object], num_bytes: int) -> None:
    """Report the rate at which `once` moves its bytes."""
    rate = num_bytes / best_seconds(once)
    result(name, bytes_per_second=rate)
    say(f"{name}: {rate / 1e12:.3f} TB/s")


def of_training(depth: int, device: torch.device, *, small: bool) -> None:
    """Report every product of a training step: forward, and the gradients of input and weight."""
    model = model_for_depth(depth, **({"vocab_size": 512, "sequence_len": 64} if small else {}))
    width, vocab = model.width, model.vocab_size
    tokens, block = (64, 32) if small else (ROWS, BLOCK)
    for name, out, into, rows in (
        ("q, k, v, proj", width, width, tokens),
        ("up", 4 * width, width, tokens),
        ("down", width, 4 * width, tokens),
        ("lm_head", vocab, width, tokens),
        ("lm_head in a block", vocab, width, block),
    ):
        product(f"d{depth} {name}", rows, out, into, device)
        product(f"d{depth} {name}, dX", rows, into, out, device, right="rows")
        product(f"d{depth} {name}, dW", out, into, rows, device, left="columns", right="rows")


def product(
    name: str, m: int, n: int, k: int, device: torch.device, **layouts: Literal["rows", "columns"]
) -> None:
    """Report the FLOP/s of a product (m, k) by (k, n) in bf16, and in fp8 with exact and fast sums.

    layouts: of `left` (m, k), rows unless given, and `right` (k, n), columns unless given. fp8 has
    both as it needs them; what another layout costs it there is the rate with transposing.
    """
    is_there = layouts.get("left", "rows") == "rows", layouts.get("right", "columns") == "columns"
    left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    right = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    a = left if is_there[0] else left.T.contiguous().T
    b = right.T if is_there[1] else right.T.contiguous()
    unit = torch.ones((), device=device)
    quick, slow = left.to(E4M3), right.to(E4M3)
    stored = [
        t if there else t.T.contiguous().T for t, there in zip((quick, slow), is_there, strict=True)
    ]

    def in_fp8(x: Tensor, y: Tensor, *, fast: bool = False) -> Tensor:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] - its only name
            x, y.T, scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    ways: dict[str, Callable[[], Tensor]] = {
        "bf16": lambda: a @ b,
        "fp8": lambda: in_fp8(quick, slow),
        "fp8 fast": lambda: in_fp8(quick, slow, fast=True),
    }
    if not all(is_there):
        ways["fp8 with transposing"] = lambda: in_fp8(*(t.contiguous() for t in stored))
    flops = {way: 2 * m * n * k / best_seconds(once, repeats=10) for way, once in ways.items()}
    result(f"product {name}", shape=[m, n, k], flops=flops)
    cells = ", ".join(f"{way} {rate / 1e12:,.0f}" for way, rate in flops.items())
    say(f"{name} {m} x {n} x {k}: {cells} TFLOP/s")


if __name__ == "__main__":
    main()
