"""What this GPU can do at best: copying, reading, and matrix products at the models' shapes.

python -m bench.gpu.probe --device cuda
"""

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.gpu.nvml import find_gpu
from bench.gpu.report import needs_gpu, result, say
from nanochat_core.model.attention_backends import BACKENDS
from nanochat_core.scaling import model_for_depth
from nanochat_core.self_test import best_seconds, product_flops

ROWS = 32768  # of a product: 16 rows of 2048 tokens
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
    on_gpu = device.type == "cuda"
    bandwidths(COPIED if on_gpu else 2**18, device)
    rows = ROWS if on_gpu else 32
    depths = (12, 20, 24) if on_gpu else (2,)
    square = SQUARE if on_gpu else 64
    products("square", square, square, square, device)
    for depth in depths:
        width = model_for_depth(depth).width
        products(f"d{depth} up", rows, 4 * width, width, device)
        products(f"d{depth} down", rows, width, 4 * width, device)
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


def products(name: str, m: int, n: int, k: int, device: torch.device) -> None:
    """Report the FLOP/s of (m, k) @ (k, n) in bf16, and in fp8 with exact and fast sums."""
    kinds = {"bf16": ("bf16", False), "fp8": ("fp8", False), "fp8 fast": ("fp8", True)}
    flops = {
        label: product_flops(kind, m, n, k, device, fast=fast)
        for label, (kind, fast) in kinds.items()
    }
    result(f"product {name}", shape=[m, n, k], flops=flops)
    cells = ", ".join(f"{kind} {rate / 1e12:,.0f}" for kind, rate in flops.items())
    say(f"{name} {m} x {n} x {k}: {cells} TFLOP/s")


if __name__ == "__main__":
    main()
