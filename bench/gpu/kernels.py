"""The parts of a training step, each beside float64 and beside torch's own way: error and time.

    python -m bench.gpu.kernels --device cuda --depth 24

The loss in bf16 and fp8, the embedding's gradient, quantising to fp8, and the optimizer's step.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.report import needs_gpu, result, say
from bench.gpu.trainer import SCHEDULE, make_model
from nanochat_core.model import loss
from nanochat_core.model.fp8 import E4M3, E5M2, Quantised, quantise
from nanochat_core.model.gradient_sum import GradientSum
from nanochat_core.model.loss import softcap_loss
from nanochat_core.model.tables import gradient as table_gradient
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.scaling import run_for_depth
from nanochat_core.self_test import best_seconds

BANDS = {"bf16": 0.01, "fp8": 0.1}  # of the norm of what float64 gives
CHECKED = 2048  # tokens beside float64, which takes 8 bytes for each of their logits
Gradients = tuple[Tensor, Tensor]  # of hidden states and weight


def main() -> None:
    """Measure all; exit 1 where an error is outside its band."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--depth", type=int, default=24)
    options = parser.parse_args()
    device, on_gpu = torch.device(options.device), options.device == "cuda"
    run = run_for_depth(options.depth, precision="bf16")
    width, softcap = run.model.width, run.numerics.softcap
    vocab = run.model.vocab_size if on_gpu else 512
    tokens = 16 * run.model.sequence_len if on_gpu else 64
    failures = losses(tokens, width, vocab, softcap, device)
    lookups(tokens, width, vocab, device)
    quantising(tokens, width, device)
    optimizing(options.depth, device, small=not on_gpu)
    if not on_gpu:
        needs_gpu("times of kernels")
    for line in failures:
        say(line)
    sys.exit(1 if failures else 0)


def losses(tokens: int, width: int, vocab: int, softcap: float, device: torch.device) -> list[str]:
    """Compare our loss and the compiled cross-entropy; return a line for each error too large."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, width, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(vocab, width, generator=generator).to(device, torch.bfloat16) * 0.1
    targets = torch.randint(vocab, (tokens,), generator=generator).to(device)
    weight = torch.nn.Parameter(weight)
    quantised = Quantised(weight)
    quantised.refresh()
    plain = torch.compile(cross_entropy) if device.type == "cuda" else cross_entropy
    ones = torch.ones(tokens, device=device)

    def ours(h: Tensor, w: Tensor, t: Tensor, fp8: Quantised | None = None) -> Tensor:
        return softcap_loss(h, w, t, ones[: len(t)], softcap=softcap, quantised=fp8)

    def in_blocks(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        with mock.patch.object(loss, "GPU_SHARE", 0):
            return ours(h, w, t)

    ways: dict[str, Callable[..., Tensor]] = {
        "loss bf16": ours,
        "loss bf16, in blocks": in_blocks,
        "loss fp8": lambda h, w, t: ours(h, w, t, quantised),
        "F.cross_entropy": lambda h, w, t: plain(h, w, t, softcap),
    }
    few = slice(0, CHECKED)
    exact = gradients(
        lambda h, w, t: cross_entropy(h, w, t, softcap),
        hidden[few].double(),
        weight.detach().double(),
        targets[few],
    )
    failures: list[str] = []
    for name, way in ways.items():
        found = gradients(way, hidden[few], weight.detach(), targets[few])
        errors = [relative(got, want) for got, want in zip(found, exact, strict=True)]
        taken = best_seconds(lambda way=way: gradients(way, hidden, weight.detach(), targets))
        result(name, errors=errors, milliseconds=1e3 * taken)
        shown = ", ".join(f"{error:.2e}" for error in errors)
        say(f"{name}: {1e3 * taken:.2f} ms, errors of the gradients {shown}")
        band = BANDS["fp8" if "fp8" in name else "bf16"]
        if not max(errors) <= band:  # true for NaN, too
            failures.append(f"{name}: an error of {max(errors):.2e}, at most {band} wanted")
    return failures


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> Tensor:
    """Return the summed loss as torch has it: hidden (N, C), weight (V, C), targets (N,)."""
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(softcap * torch.tanh(logits / softcap), targets, reduction="sum")


def gradients(way: Callable[..., Tensor], hidden: Tensor, weight: Tensor, t: Tensor) -> Gradients:
    """Return the loss's gradients."""
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    found = torch.autograd.grad(way(*leaves, t), leaves)
    return found[0], found[1]


def relative(got: Tensor, want: Tensor) -> float:
    """Return the norm of the difference over that of `want`."""
    return float((got.double() - want).norm() / want.norm())


def lookups(tokens: int, width: int, vocab: int, device: torch.device) -> None:
    """Time the gradient of an embedding: added to an fp32 sum, and as torch's compiler has it."""
    ids = torch.randint(vocab, (tokens,), device=device)
    table = torch.randn(vocab, width, device=device, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    total = torch.zeros(vocab, width, device=device)
    ordered = table_gradient.sort(ids, vocab)
    # Twice the embedding: the compiler leaves a single operation to torch.
    plain = torch.compile(lambda t: 2 * F.embedding(ids, t)) if device.type == "cuda" else None
    into = GradientSum(device, lambda: (total, True), lambda proxy: None)
    ways: dict[str, Callable[[], object]] = {
        "sort": lambda: table_gradient.sort(ids, vocab),
        "added": lambda: table_gradient.add_lookup_gradient(grad, *ordered, into.number),
    }
    if plain is not None:
        ways["compiled"] = lambda: total.add_(torch.autograd.grad(plain(table), table, grad)[0])
    times = {name: 1e3 * best_seconds(way) for name, way in ways.items()}
    result("gradient of an embedding", milliseconds=times)
    say("gradient of an embedding: " + listed(times))


def quantising(tokens: int, width: int, device: torch.device) -> None:
    """Time quantising activations, gradients, and a weight with its transpose."""
    x = torch.randn(tokens, 4 * width, device=device, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.randn(4 * width, width, device=device))
    copies = Quantised(weight)

    def refresh() -> None:
        with torch.no_grad():
            weight.mul_(1.0)  # unchanged weights are not quantised again
        copies.refresh()

    ways: dict[str, Callable[[], object]] = {
        "e4m3": lambda: quantise(x, E4M3),
        "e5m2": lambda: quantise(x, E5M2),
        "weight": refresh,
    }
    times = {name: 1e3 * best_seconds(way) for name, way in ways.items()}
    result("quantise", milliseconds=times, shape=list(x.shape))
    say(f"quantise {list(x.shape)}: " + listed(times))


def optimizing(depth: int, device: torch.device, *, small: bool) -> None:
    """Time the optimizer's step of a whole model."""
    shape = {"vocab_size": 512, "sequence_len": 64} if small else {}
    run = run_for_depth(depth, precision="bf16", **shape)
    model = make_model(run, device)
    optimizer = Optimizer(model, run.optimizer, precision="bf16", world=ALONE)
    parameters: Sequence[Tensor] = list(model.parameters())
    given = [torch.randn_like(p) for p in parameters]

    def once() -> None:
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step(**SCHEDULE)

    milliseconds = 1e3 * best_seconds(once, repeats=3)
    result("optimizer step", milliseconds=milliseconds, depth=depth)
    say(f"optimizer step at depth {depth}, gradients copied: {milliseconds:.1f} ms")


def listed(times: dict[str, float]) -> str:
    """Return times as text."""
    return ", ".join(f"{name} {value:.2f} ms" for name, value in times.items())


if __name__ == "__main__":
    main()
