"""What each attention backend costs beside torch's SDPA, forward and backward.

    python bench/attention.py [--depths 12 24] [--rows 4] [--seconds 1]

Per depth one row of the table for the short and the full window, with nanochat's shapes: sequences
of 2048 tokens, heads of 128 channels. A backend that cannot run here is named with the reason. On a
CPU the shapes are depth 4's in fp32 unless given, and the mask that SDPA would need for a window is
measured too, as SDPA works in bands there.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nanochat_core.model.attention_backends import BACKENDS, SDPA, Call, band, mixed
from nanochat_core.model.shape import head_dim
from nanochat_core.scaling import run_for_depth

Times = dict[str, float]  # backend -> milliseconds


def main() -> None:
    """Measure, print a table and a line of JSON."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Attention backends beside SDPA.")
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24] if on_gpu else [4])
    parser.add_argument("--rows", type=int, default=16 if on_gpu else 1)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    options = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    calls = able(device, dtype)
    if not on_gpu:
        calls["sdpa with a mask"] = with_mask
    found: dict[str, Times] = {}
    for depth in options.depths:
        model = run_for_depth(depth).model
        shape = (options.rows, model.sequence_len, model.num_heads, head_dim(model))
        for window in sorted({min(w, model.sequence_len - 1) for w in model.windows}):
            times = {
                name: milliseconds(call, shape, window, device, dtype, options.seconds)
                for name, call in calls.items()
            }
            found[f"d{depth}, window {window}"] = times
    report(found)
    machine = torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads"
    print(json.dumps({"bench": "attention", "machine": machine, "milliseconds": found}))


def able(device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    """The backends that can run here, SDPA first; prints why the others cannot."""
    calls = {SDPA.name: SDPA.load()}
    for backend in BACKENDS:
        reason = backend.unable(device, dtype)
        if reason is not None:
            print(f"{backend.name} is left out: {reason}")
        elif backend is not SDPA:
            calls[backend.name] = backend.load()
    return calls


def with_mask(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """SDPA with one mask over the whole row."""
    mask = band(q.size(1), q.size(1), window, q.device)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return mixed(q, k, v, mask).transpose(1, 2)


def milliseconds(
    call: Call,
    shape: tuple[int, ...],
    window: int,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
) -> float:
    """The fastest forward and backward pass within `seconds`, after one that warms up."""
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=dtype)

    def once() -> None:
        torch.autograd.grad(call(q, k, v, window), (q, k, v), grad)

    timed(once, device)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        best = min(best, timed(once, device))
    return best


def timed(once: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of one call; of this process's CPU where there is no GPU."""
    if device.type == "cpu":
        began = time.process_time()
        once()
        return (time.process_time() - began) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    once()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def report(found: dict[str, Times]) -> None:
    """Milliseconds, and how many times as fast as SDPA."""
    names = list(next(iter(found.values())))
    print("".join(f"{title:>24}" for title in ("", *names)))
    for case, times in found.items():
        cells = [f"{times[n]:.2f} ms ({times['sdpa'] / times[n]:.2f}x)" for n in names]
        print("".join(f"{cell:>24}" for cell in (case, *cells)))


if __name__ == "__main__":
    main()
