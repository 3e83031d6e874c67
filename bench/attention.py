"""What each attention backend costs beside torch's SDPA, forward and backward.

    python bench/attention.py [--depths 12 24] [--rows 4] [--seconds 1] [--references]

Per depth one row of the table for the short and the full window, with nanochat's shapes: sequences
of 2048 tokens, heads of 128 channels. A backend that cannot run here is named with the reason. On a
CPU the shapes are depth 4's in fp32 unless given, and the mask that SDPA would need for a window is
measured too, as SDPA works in bands there. With --references also torch's causal SDPA, which has
no window, and the largest error of each output and gradient beside SDPA in fp32, relative to the
largest value. Not run on a GPU yet.
"""

import argparse
import json
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.model.attention_backends import BACKENDS, SDPA, Call, band, mixed
from nanochat_core.model.shape import head_dim
from nanochat_core.scaling import run_for_depth

Times = dict[str, float]  # backend -> milliseconds
Problem = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k, v and the output's gradient


def main() -> None:
    """Measure, print a table and a line of JSON."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Attention backends beside SDPA.")
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24] if on_gpu else [4])
    parser.add_argument("--rows", type=int, default=16 if on_gpu else 1)
    parser.add_argument("--sequence-len", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement")
    parser.add_argument("--references", action="store_true", help="torch's other ways, and errors")
    options = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    calls = able(device, dtype)
    if not on_gpu:
        calls["sdpa with a mask"] = with_mask
    if options.references:
        calls["causal"] = causal
    forward: dict[str, Times] = {}
    found: dict[str, Times] = {}
    errors: dict[str, Times] = {}
    for depth in options.depths:
        model = run_for_depth(depth, sequence_len=options.sequence_len).model
        shape = (options.rows, model.sequence_len, model.num_heads, head_dim(model))
        for window in sorted({min(w, model.sequence_len - 1) for w in model.windows}):
            case = f"d{depth}, window {window}"
            problem = make_problem(shape, device, dtype)
            able_calls = {n: c for n, c in calls.items() if sees(n, window, shape[1])}
            timings = {
                name: times(call, problem, window, options.seconds)
                for name, call in able_calls.items()
            }
            forward[case] = {name: of[0] for name, of in timings.items()}
            found[case] = {name: of[1] for name, of in timings.items()}
            if options.references:
                errors[case] = {n: error(c, problem, window) for n, c in able_calls.items()}
    print("forward alone")
    report(forward)
    print("forward and backward")
    report(found)
    for case, of in errors.items():
        print(f"errors, {case}: " + ", ".join(f"{n} {value:.1e}" for n, value in of.items()))
    machine = torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads"
    print(
        json.dumps(
            {
                "bench": "attention",
                "machine": machine,
                "milliseconds": found,
                "forward": forward,
                "errors": errors,
            }
        )
    )


def able(device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    """The backends that can run here, SDPA first; prints why the others cannot."""
    calls = {SDPA.name: SDPA.load()}
    for backend in BACKENDS:
        reason = backend.unable(device, dtype)
        if reason is not None:
            print(f"{backend.name} is left out: {reason}")
            if backend.capabilities and device.type == "cpu":
                print(json.dumps({"name": backend.name, "needs": "a GPU"}))
        elif backend is not SDPA:
            calls[backend.name] = backend.load()
    return calls


def with_mask(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """SDPA with one mask over the whole row."""
    mask = band(q.size(1), q.size(1), window, q.device)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return mixed(q, k, v, mask).transpose(1, 2)


def causal(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """SDPA of the whole row, as torch has it: it knows no window."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sees(name: str, window: int, length: int) -> bool:
    """Return whether a call computes with this window: causal SDPA has the whole one alone."""
    return name != "causal" or window >= length - 1


def make_problem(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Problem:
    """Return random q, k, v, which need gradients, and the output's gradient."""
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v, torch.randn(shape, device=device, dtype=dtype)


def both(call: Call, problem: Problem, window: int) -> list[Tensor]:
    """Compute the output and the gradients of q, k and v."""
    q, k, v, grad = problem
    out = call(q, k, v, window)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def error(call: Call, problem: Problem, window: int) -> float:
    """Return the largest error beside SDPA in fp32 on the first row, over the largest value."""
    first = [t.detach()[:1].requires_grad_() for t in problem[:3]]
    wide = [t.detach()[:1].float().requires_grad_() for t in problem[:3]]
    grad = problem[3][:1]
    found = both(call, (first[0], first[1], first[2], grad), window)
    exact = both(with_mask, (wide[0], wide[1], wide[2], grad.float()), window)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
    return max(errors, key=lambda e: math.inf if math.isnan(e) else e)


def times(call: Call, problem: Problem, window: int, seconds: float) -> tuple[float, float]:
    """Return the milliseconds of a forward pass, and of one with its backward pass."""
    q, k, v, _ = problem
    return (
        fastest(lambda: call(q, k, v, window), q.device, seconds / 2),
        fastest(lambda: both(call, problem, window), q.device, seconds),
    )


def fastest(once: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the milliseconds of the fastest call within `seconds`, after one that warms up."""
    timed(once, device)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        best = min(best, timed(once, device))
    return best


def timed(once: Callable[[], object], device: torch.device) -> float:
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
    names = list(dict.fromkeys(name for times in found.values() for name in times))
    print("".join(f"{title:>24}" for title in ("", *names)))
    for case, times in found.items():
        cells = [
            f"{times[n]:.2f} ms ({times['sdpa'] / times[n]:.2f}x)" if n in times else "-"
            for n in names
        ]
        print("".join(f"{cell:>24}" for cell in (case, *cells)))


if __name__ == "__main__":
    main()
