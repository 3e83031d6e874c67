"""Training tokens per second, ours beside nanochat's script, on one GPU at the same time.

    python -m bench.gpu.pairs CASE [--peers ours shipped L] [--levers qk_kernel ...] [--dry]

All sides start together and compile together; one that is not ready in time is dropped. Then each
is timed alone, round after round, while the others are stopped (SIGSTOP): the memory of all of them
has to fit. With --profile the kernels of one more step of each are reported by class, in the same
process. Case `slice` is four layers of depth 24's width, which compile in a minute.

Peers: `ours` has our attention operation in place of its own, so that the ratio compares all the
rest; `shipped` has what it takes without its own kernels, masked SDPA; `L` is that with
--window-pattern L, its advice for such a machine. Without NANOCHAT_DIR we run alone. Each lever is
one more side of ours, with an option that no GPU has tried, or `rows`, with twice as many rows at a
time: its ratio above 1 says that we are faster without it.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import profiles
from bench.gpu.nvml import Gpu, Sampler, find_gpu
from bench.gpu.report import needs_gpu, result, say, wait_turn
from bench.gpu.trainer import make_run
from bench.train import Case, Round, Side, SideFailed, our_command, peer_command, speed
from nanochat_core.runtime.hardware.gpu_specs import peak_flops
from nanochat_core.scaling import flops_per_token

HERE = Path(__file__).resolve().parent
LARGE = 100e9  # bytes: an H200 has 141e9, an H100 80e9
# Rows of a micro-step times depth squared, of which two sides fit on 80e9 bytes: of 2304 two at
# depth 12 took 34e9.
FITTING = 4800
PROFILED = 1  # steps
PEERS = ("ours", "shipped", "L")
LEVERS: dict[str, dict[str, Any]] = {
    "qk_kernel": {"qk_kernel": True},
    "weight_kernel": {"weight_kernel": True},
    "autotune": {"autotune": True},
    "blocks": {"compile": "blocks"},
    "bound": {"fp8_scales": "bound"},
    "fast": {"fp8_sums": "fast"},
}
TWICE = "rows"  # the lever: twice as many at a time, in half as many micro-steps
NOT_ON_A_CPU = ("qk_kernel", "weight_kernel", "autotune", "blocks")


def gpu_case(name: str, depth: int, precision: str, rows: int, accumulate: int) -> Case:
    """Return a case on a GPU, with the best attention that the machine has for both sides."""
    return Case(
        name=name,
        depth=depth,
        device="cuda",
        precision=precision,
        rows=rows,
        accumulate=accumulate,
        attention="auto",
        peer_attention="auto",
    )


CASES = {
    "d12": gpu_case("d12", 12, "bf16", 16, 16),
    "d20": gpu_case("d20", 20, "bf16", 16, 4),
    "slice": dataclasses.replace(gpu_case("slice", 4, "fp8", 16, 4), width=1536),
}


def main() -> None:
    """Measure; print a table and a result for each side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["ours"])
    parser.add_argument("--levers", nargs="+", choices=(*LEVERS, TWICE), default=[])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="in a round")
    parser.add_argument("--threads", type=int, default=4, help="of the CPU, of each side")
    parser.add_argument("--ready", type=float, default=600.0, help="seconds to compile in")
    parser.add_argument("--profile", action="store_true", help="kernels of one more step")
    parser.add_argument("--dry", action="store_true", help="on a CPU, at depth 2")
    options = parser.parse_args()
    gpu = None if options.dry else find_gpu()
    case = shrink(CASES[options.case]) if options.dry else fit(CASES[options.case], gpu)
    if options.dry:
        options.steps, options.rounds, options.threads = 1, 1, 1
    checkout = os.environ.get("NANOCHAT_DIR")
    if checkout is None and options.peers:
        say("HEAD is skipped: NANOCHAT_DIR names no checkout of nanochat")
    commands = {"we": ours(case, options.threads)}
    for lever in options.levers:
        if lever in NOT_ON_A_CPU and options.dry:
            needs_gpu(lever)
            continue
        commands[f"we, {lever}"] = ours(variant_of(case, lever), options.threads)
    for peer in options.peers if checkout is not None else ():
        variant = of_peer(case, peer)
        commands[f"HEAD, {peer}"] = peer_command(variant, Path(checkout or ""), options.threads)
    found = measure(case, commands, gpu, options)
    for line in table(case, found, gpu):
        say(line)
    if failed := [name for name, rounds in found.items() if not rounds]:
        raise SystemExit(f"no figures of {', '.join(failed)}")


def shrink(case: Case) -> Case:
    """Return the case for a CPU, at depth 2, and as small as a product in fp8 may be.

    On an Intel processor with AMX torch multiplies fp8 by oneDNN's reference, 20 million a second.
    """
    return dataclasses.replace(
        case,
        depth=2,
        device="cpu",
        rows=1,
        accumulate=2,
        sequence_len=32,
        vocab_size=512,
        compile=False,
        width=case.width and 128,
    )


def variant_of(case: Case, lever: str) -> Case:
    """Return the case with an option, or with the same tokens in half as many micro-steps."""
    if lever == TWICE:
        return dataclasses.replace(case, rows=2 * case.rows, accumulate=case.accumulate // 2)
    return dataclasses.replace(case, **LEVERS[lever])


def fit(case: Case, gpu: Gpu | None) -> Case:
    """Return the case with fewer rows in each of more micro-steps where two sides would not fit."""
    if gpu is None or gpu.total_bytes >= LARGE:
        return case
    parts = 1
    while case.rows // parts * case.depth * (case.width or 64 * case.depth) > 64 * FITTING:
        parts *= 2
    return dataclasses.replace(case, rows=case.rows // parts, accumulate=parts * case.accumulate)


def ours(case: Case, threads: int) -> list[str]:
    """Return our side's command."""
    return [str(HERE / "trainer.py"), our_command(case, threads)[1]]


def of_peer(case: Case, peer: str) -> Case:
    """Return the case with a peer's attention and windows."""
    if peer == "ours":
        return case
    pattern = "L" if peer == "L" else None
    return dataclasses.replace(case, peer_attention="shipped", window_pattern=pattern)


def measure(
    case: Case, commands: dict[str, list[str]], gpu: Gpu | None, options: argparse.Namespace
) -> dict[str, list[Round]]:
    """Return the rounds of each side, with `joules` and `clocks` where the GPU reports them.

    The first one begins when all sides have compiled and it is this program's turn. A side that
    fails, or is late, has none; its last lines are printed.
    """
    began = time.monotonic()
    found: dict[str, list[Round]] = {name: [] for name in commands}
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, command in commands.items():
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pair-"))
            sides[name] = Side(command, Path(directory), eager=not case.compile)
            stack.callback(sides[name].close)
        late = options.ready
        for name in list(sides):
            with failing(name, sides, found):
                sides[name].wait_ready(max(1.0, late - (time.monotonic() - began)))
                say(f"{name}: ready after {time.monotonic() - began:.0f} s")
        for side in sides.values():
            side.hold()
        wait_turn()
        for number in range(options.rounds + 1):
            for name, side in list(sides.items()):
                with failing(name, sides, found):
                    timed = alone(side, options.steps if number else 1, gpu)
                    if number:  # the first one warms up
                        found[name].append(timed)
                        result(f"{case.name} {name}", round=timed)
                        say(f"{name}, round {number}: {speed(case, [timed]):,.0f} tokens/s")
        for name, side in list(sides.items()) if options.profile else ():
            with failing(name, sides, {name: []}):  # its rounds stay
                profile(f"{case.name} {name}", side)
    return found


def profile(title: str, side: Side) -> None:
    """Report the kernels of a step of one side."""
    side.release()
    found = side.run(PROFILED, "profile")["profile"]
    side.hold()
    result(f"profile {title}", **found)
    for line in profiles.lines(title, found):
        say(line)


def alone(side: Side, steps: int, gpu: Gpu | None) -> Round:
    """Return a round of one side, the others being held; it is held again after it."""
    side.release()
    sampler = Sampler(gpu) if gpu else None
    began = gpu.joules() if gpu else None
    timed = side.run(steps)
    ended = gpu.joules() if gpu else None
    side.hold()
    return timed | {
        "joules": None if began is None or ended is None else ended - began,
        "clocks": sampler.close() if sampler else None,
    }


@contextlib.contextmanager
def failing(name: str, sides: dict[str, Side], found: dict[str, list[Round]]) -> Iterator[None]:
    """Drop a side that fails inside the block, and print why."""
    try:
        yield
    except SideFailed as error:
        say(f"{name} {error}")
        found[name] = []
        del sides[name]


def table(case: Case, found: dict[str, list[Round]], gpu: Gpu | None) -> Iterator[str]:
    """Yield a line for each side that came through; report its result, with its ratio to ours."""
    peak = peak_flops(gpu.name) if gpu else None
    yield (
        f"{case.name}: {case.tokens:,} tokens a step, {case.rows} rows at a time, {case.precision}"
    )
    yield f"{'':<14}{'tokens/s':>10}{'MFU':>7}{'GB':>7}{'J/Mtoken':>10}{'we / it':>9}"
    best = speed(case, found["we"]) if found["we"] else None
    for name, rounds in found.items():
        if not rounds:
            continue
        tokens_per_second = speed(case, rounds)
        row: dict[str, Any] = {
            "tokens_per_second": round(tokens_per_second),
            "gigabytes": round(max(r["peak_bytes"] for r in rounds) / 1e9, 2),
            "mfu": peak and round(tokens_per_second * flops(case) / peak, 4),
            "joules_per_million_tokens": joules(case, rounds),
            "ratio": best and round(best / tokens_per_second, 3),
        }
        result(f"{case.name} {name}", case=dataclasses.asdict(case), rounds=rounds, **row)
        cells = (row["mfu"], row["gigabytes"], row["joules_per_million_tokens"], row["ratio"])
        mfu, gigabytes, energy, ratio = ("-" if cell is None else str(cell) for cell in cells)
        yield f"{name:<14}{tokens_per_second:>10,.0f}{mfu:>7}{gigabytes:>7}{energy:>10}{ratio:>9}"
    if gpu is None:
        needs_gpu(f"{case.name}: speed, MFU, energy, clocks, kernels")


def flops(case: Case) -> float:
    """Return the FLOPs of a token."""
    run = make_run(dataclasses.asdict(case))
    return flops_per_token(run.model, run.numerics)


def joules(case: Case, rounds: Sequence[Round]) -> float | None:
    """Return the median energy of a million tokens; None where the GPU does not count it."""
    if rounds[0]["joules"] is None:
        return None
    return round(
        statistics.median(1e6 * r["joules"] / (case.tokens * r["steps"]) for r in rounds), 1
    )


if __name__ == "__main__":
    main()
