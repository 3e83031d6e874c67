"""Predict a micro-step beside nanochat's from counted bytes, without a GPU.

    python -m bench.gpu.predicted --nanochat DIR [--cases d12 d24]

Per side and placement: bytes and launches of all kernels but products and attention, and their
time at the bandwidth of an H100 and an H200. Those of the compiled pass are counted by
`generated_code`, from depths 2 and 4; the others are formulas of the model's shape, and of the loss
and the optimizer what docs/reference/gpu.md counted. Products and attention are the same on both
sides. It needs what `generated_code` needs; a case takes some four minutes of a CPU.
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.gpu.cuda_stub import with_stub
from bench.gpu.generated_code import DEPTHS, KINDS, PASSES, run_case
from bench.gpu.report import result, say
from nanochat_core.scaling import model_for_depth

BANDWIDTH = {"H100": 2.75e12, "H200": 4.3e12}  # bytes per second: 90 % of reading; assumed
TOKENS, MICRO_STEPS = 32768, 16
# What runs between the graphs of `compile=blocks`, in rows a layer: lookups of value embeddings in
# every second layer, and the gradient of the first block's input, which is added layer by layer.
BETWEEN = 1.0 + 3.0
PLACEMENTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, blocks": {"compile": "blocks"},
    "ours, qk_kernel": {"qk_kernel": True},
    "ours, weight_kernel": {"weight_kernel": True},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model; GB and launches of our loss and of a step of both optimizers, and measured ms."""

    depth: int
    precision: str
    loss: tuple[float, int]
    optimizer: tuple[float, int]
    peer_optimizer: float  # estimated
    peer_ms: float  # an H100's; at depth 24 by bytes and rates


CASES = {
    "d12": Case(depth=12, precision="bf16", loss=(6.5, 32), optimizer=(8.5, 171),
                peer_optimizer=10.0, peer_ms=63.2),
    "d24": Case(depth=24, precision="fp8", loss=(11.4, 39), optimizer=(50.4, 288),
                peer_optimizer=60.0, peer_ms=268.0),
}  # fmt: skip


def main() -> None:
    """Print a table for each case."""
    parser = argparse.ArgumentParser(description="A micro-step beside nanochat's, predicted.")
    parser.add_argument("--nanochat", type=Path, required=True, help="its checkout")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        environment = with_stub(Path(directory))
        for name in options.cases:
            show(name, CASES[name], environment, options.nanochat)


def show(name: str, case: Case, environment: dict[str, str], nanochat: Path) -> None:
    """Print a line for nanochat and for each placement of ours."""
    say(f"{name} {case.precision}: GB and launches besides products and attention, not run")
    peer, launches = passes(environment, case, "nanochat", nanochat, {})
    peer += peer_outside(case)
    line(name, "nanochat", peer, launches, peer, case)
    for title, how in PLACEMENTS.items():
        if title.endswith("weight_kernel") and case.precision == "fp8":
            continue  # products in fp8 are not the kernel's
        moved, launches = passes(environment, case, "ours", nanochat, how)
        more, others = outside(case, sums=title != "ours, weight_kernel")
        line(name, title, moved + more, launches + others, peer, case)


def passes(
    environment: dict[str, str], case: Case, side: str, nanochat: Path, how: dict[str, Any]
) -> tuple[float, float]:
    """Return bytes and launches of the compiled pass, both directions."""
    plain = {"compile": "whole", "qk_kernel": False, "weight_kernel": False}
    options = SimpleNamespace(**plain | how, width_depth=case.depth, rows=16, nanochat=nanochat,
                              fp8_scales="bound", keep=None)  # fmt: skip
    few, many = (run_case(environment, options, side, case.precision, d) for d in DEPTHS)
    found = 0.0, 0.0
    kinds = [kind for kind in KINDS if kind not in ("product", "attention")]
    for at, of in enumerate(("bytes", "kernels")):
        small, large = (
            sum(counted[direction][of][kind] for direction in PASSES for kind in kinds)
            for counted in (few, many)
        )
        layer = (large - small) / (DEPTHS[1] - DEPTHS[0])
        total = small + (case.depth - DEPTHS[0]) * layer
        found = (total, found[1]) if at == 0 else (found[0], total)
    if how.get("compile") == "blocks":
        found = found[0] + BETWEEN * case.depth * few["forward"]["row"], found[1]
    return found


def shape(case: Case) -> tuple[float, float, float]:
    """Return numbers in matrices of blocks, in one table, and how many tables there are."""
    model = model_for_depth(case.depth)
    return 12 * case.depth * model.width**2, model.vocab_size * model.width, 1 + case.depth / 2


def outside(case: Case, *, sums: bool) -> tuple[float, float]:
    """Return bytes and launches of ours outside of the pass. `sums`: of matrices' gradients."""
    model, (matrices, _, tables) = model_for_depth(case.depth), shape(case)
    distinct = model.vocab_size * (1 - (1 - 1 / model.vocab_size) ** TOKENS)
    # A table's gradient is read in bf16; of distinct tokens the fp32 sum is read and written.
    moved = tables * model.width * (2 * TOKENS + 8 * distinct)
    moved += 1e9 * (case.loss[0] + case.optimizer[0] / MICRO_STEPS)
    launches = 2 * tables + 1 + case.loss[1] + case.optimizer[1] / MICRO_STEPS
    if sums:  # bf16 gradient, fp32 sum; the kernel's two launches replace a product and a sum
        moved, launches = moved + 10 * matrices, launches + 6 * case.depth
    return moved, launches


def peer_outside(case: Case) -> float:
    """Return nanochat's bytes outside of the pass, in which its loss is."""
    matrices, table, tables = shape(case)
    sums = 6 * tables * table + 12 * (matrices + table)  # bf16 tables; fp32 matrices and lm_head
    return sums + 1e9 * case.peer_optimizer / MICRO_STEPS


def line(name: str, title: str, moved: float, launches: float, peer: float, case: Case) -> None:
    """Print and report one side."""
    times = {card: 1e3 * moved / rate for card, rate in BANDWIDTH.items()}
    ahead = 1e3 * (peer - moved) / BANDWIDTH["H100"]
    ratio = case.peer_ms / (case.peer_ms - ahead)
    result(
        "predicted", case=name, side=title, bytes=moved, launches=launches, ms=times, ratio=ratio
    )
    cells = ", ".join(f"{card} {ms:.1f} ms" for card, ms in times.items())
    say(
        f"{title}: {moved / 1e9:.1f} GB, {launches:.0f} launches; {cells}; beside nanochat's "
        f"{case.peer_ms:g} ms on an H100, by bytes alone: {ratio:.3f} times"
    )


if __name__ == "__main__":
    main()
