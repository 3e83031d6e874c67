"""Compile the decode kernels for an H100 or H200, without having one.

    python -m bench.gpu.decode_kernels [--depth 20] [--rows 1 8] [--length 1024]

Builds the launches of a decode step on torch's meta device, compiles each kernel for sm_90 with
Triton's own compiler and prints, for each: launches in a step, programs, warps, registers a thread,
bytes spilled, bytes of local memory, shared memory, loads or prefetches and stores before the wait
for the previous kernel; instructions that a warp issues, of them barriers and products of tensor
cores; and bytes that the launches read of matrices or keys and values. It needs `pip install
triton` and no GPU; nothing is run.

The last lines predict a step's time: for each kernel the greater of its bytes over the bandwidth
that was measured by reading and of its instructions at a share of the issue rate, and a boundary
between dependent kernels. Share and boundary were fitted to an H100's 690 us a step at one row of
544 tokens and 1,970 us at eight (2026-11-27); of the kernels of then they make 690 and 2,120.
"""

import argparse
import math
import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.runtime import driver  # pyright: ignore[reportMissingImports]

from bench.gpu.report import result, say
from nanochat_core.engine.kernels import attention, products
from nanochat_core.engine.kv_cache.page_pool import PagePool
from nanochat_core.engine.runner import Capacity
from nanochat_core.engine.runners.choose import PAGE_SIZE, page_groups
from nanochat_core.engine.runners.decode_kernels import (
    DecodeKernels,
    Launch,
    Target,
)
from nanochat_core.engine.runners.device_runner import MAX_CANDIDATES
from nanochat_core.engine.runners.device_state import State
from nanochat_core.engine.runners.weights import Weights
from nanochat_core.model import qk_kernel
from nanochat_core.model.gpt import GPT
from nanochat_core.model.matrices import kernel as matrix_kernel
from nanochat_core.model.shape import head_dim
from nanochat_core.model.tables import kernel as table_kernel
from nanochat_core.scaling import model_for_depth, numerics

SM_90 = GPUTarget("cuda", 90, 32)
MULTIPROCESSORS = 132  # of an H100 SXM and an H200
BANDWIDTH = {"H100 SXM": 3.05e12, "H200": 4.3e12}  # bytes per second, read; the H200's assumed
MAX_ROWS = 32
BOUNDARY = 2.7e-6  # seconds
CLOCK = 1.755e9  # instructions a second of each of a multiprocessor's four schedulers
STALLED = 2.5  # of a kernel's time over that of issuing its instructions, where few warps are there
META = torch.device("meta")
COLUMNS = (
    *("kernel", "launches", "programs", "warps", "registers", "spilled B", "local B", "shared B"),
    *("early loads", "early stores", "instructions", "barriers", "tensor", "MB"),
)


class NoDriver:
    """In place of CUDA's driver: names the target, and can launch nothing."""

    def get_current_target(self) -> GPUTarget:
        """Return what is compiled for."""
        return SM_90

    def get_current_device(self) -> int:
        """Return a device number: Triton stores its compiled kernels under it."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return a stream number."""
        return 0


def main() -> None:
    """Compile all, print a table and the estimates."""
    parser = argparse.ArgumentParser(description="Decode kernels, compiled for sm_90.")
    parser.add_argument("--depth", type=int, default=20)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--length", type=int, default=1024, help="tokens of each row so far")
    parser.add_argument("--boundary", type=float, default=BOUNDARY, help="seconds")
    options = parser.parse_args()
    driver.set_active(NoDriver())  # pyright: ignore[reportArgumentType]
    kernels = make_kernels(options.depth)
    say(f"triton {triton.__version__}, sm_90, depth {options.depth} in bf16; not run on a GPU")
    for rows in options.rows:
        show(kernels, rows, options.length, options.boundary)
    show_training()


def make_kernels(depth: int) -> DecodeKernels:
    """Return the step of a model of this depth, without memory, laid out for an H100."""
    with torch.device("meta"):
        model = GPT(model_for_depth(depth), numerics("bf16"))
    config, bf16 = model.config, torch.bfloat16
    size, longest = PAGE_SIZE["cuda"], config.sequence_len
    capacity = Capacity(
        groups=page_groups(config, num_pages=64),
        page_size=size,
        num_slots=MAX_ROWS,
        max_len=longest,
    )
    shape = {"num_kv_heads": config.num_kv_heads, "head_dim": head_dim(config)}
    return DecodeKernels(
        Weights(model, dtype=bf16, stream_dtype=bf16, max_len=longest, plain=True),
        [PagePool(g, capacity, **shape, dtype=bf16, device=META) for g in capacity.groups],
        [
            torch.zeros(MAX_ROWS + 1, longest // size, dtype=torch.int32, device=META)
            for _ in capacity.groups
        ],
        State(MAX_ROWS, config.vocab_size, META),
        stop_tokens=torch.zeros(2, dtype=torch.int64, device=META),
        num_candidates=MAX_CANDIDATES,
        max_len=longest,
        max_rows=MAX_ROWS,
        target=Target(MULTIPROCESSORS, pdl=True),
    )


def show(kernels: DecodeKernels, rows: int, length: int, boundary: float) -> None:
    """Print the table of a step of so many rows, and the estimates."""
    slots = torch.zeros(rows, dtype=torch.int64, device=META)
    sample = kernels.sample_launch(slots, kernels.logits, slots)
    launches = [*kernels.forward_launches(slots), sample]
    alike: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        alike[name_of(launch)].append(launch)
    say(f"rows {rows}, {length} tokens each: {len(launches)} kernels")
    say(" | ".join(COLUMNS))
    total, times = 0, dict.fromkeys(BANDWIDTH, len(launches) * boundary)
    for name, of in alike.items():
        read = sum(bytes_read(kernels, launch, rows, length) for launch in of)
        total += read
        made = of[0].kernel.warmup(*of[0].args, grid=of[0].grid, **of[0].options)
        used = resources_of(made, of[0], length)
        programs = "x".join(map(str, of[0].grid))
        numbers = (len(of), programs, of[0].num_warps, *used.values(), f"{read / 1e6:.1f}")
        say(" | ".join((name, *map(str, numbers))))
        result("decode kernel", kernel=name, rows=rows, launches=len(of), bytes=read, **used)
        issue = len(of) * issue_seconds(of[0], used["instructions"])
        for gpu, bandwidth in BANDWIDTH.items():
            times[gpu] += max(read / bandwidth, issue)
    for gpu, seconds in times.items():
        share = total / BANDWIDTH[gpu] / seconds
        result("decode estimate", gpu=gpu, rows=rows, bytes=total, seconds=seconds, share=share)
        say(
            f"predicted for {gpu}: {total / 1e6:.0f} MB in {1e6 * seconds:.0f} us a step, "
            f"{rows / seconds:.0f} tokens/s, {100 * share:.0f} % of the bandwidth"
        )


def issue_seconds(launch: Launch, instructions: int) -> float:
    """Return the time that a launch takes by its instructions, on the busiest multiprocessor."""
    programs = -(-math.prod(launch.grid) // MULTIPROCESSORS)
    # The 32 warps of `sample` hide each other's waits.
    stalled = 1 if launch.num_warps == 32 else STALLED
    return stalled * programs * launch.num_warps / 4 * instructions / CLOCK


def name_of(launch: Launch) -> str:
    """Return the kernel's name, with what makes it another program than its namesakes."""
    c, name = launch.constants, launch.kernel.fn.__name__
    if name == "add":
        return "add (MLP)" if c["MIX"] else "add (attention)"
    return f"{name} ({'gated, ' if c['GATED'] else ''}{c['S']} parts)" if name == "attend" else name


def bytes_read(kernels: DecodeKernels, launch: Launch, rows: int, length: int) -> int:
    """Return the bytes of the matrix, or of keys and values, that a launch reads."""
    args = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    if launch.kernel.fn.__module__ == products.__name__:
        return args["w_ptr"].nbytes
    if launch.kernel is attention.attend:
        a_token = args["keys_ptr"][0, 0].nbytes + args["values_ptr"][0, 0].nbytes
        return rows * min(length, args["window"]) * a_token
    return 4 * rows * kernels.weights.config.vocab_size if "logits_ptr" in args else 0


def show_training() -> None:
    """Print what training's own kernels, for q or k at depth 24, use."""
    x = torch.empty(16, 2048, 12, 128, dtype=torch.bfloat16, device=META)
    table = torch.empty(1, 2048, 1, 64, dtype=torch.bfloat16, device=META)
    numbers = (*qk_kernel.sizes(x), *x.stride()[:3], 1e-6, 1.2)
    shape = {"HALF": 64, "HEADS": qk_kernel.HEADS, "num_warps": qk_kernel.WARPS}
    launches = {
        qk_kernel.forward: (x, table, table, x, *numbers[:3], *numbers[6:]),
        qk_kernel.backward: (x, x, table, table, x, *numbers),
    }
    for kernel, args in launches.items():
        name = f"qk {kernel.fn.__name__}"
        moved = x.nbytes * sum(arg is x for arg in args)
        used = resources_of(kernel.warmup(*args, grid=qk_kernel.grid(x), **shape))
        numbers_shown = ("2 a layer", *qk_kernel.grid(x), qk_kernel.WARPS, *used.values())
        say(" | ".join((name, *map(str, numbers_shown), f"{moved / 1e6:.1f}")))
        result("training kernel", kernel=name, bytes=moved, **used)
    table_kernels(x.size(0) * x.size(1), 32768, 768)
    for shape in ((768, 768), (3072, 768)):
        matrix_kernels(x.size(0) * x.size(1), *shape)


def table_kernels(tokens: int, vocab: int, width: int) -> None:
    """Print what the gradient of a table at depth 12 uses, of tokens that are uniform."""
    rows, total = (
        torch.empty(n, width, dtype=dtype, device=META)
        for n, dtype in ((tokens, torch.bfloat16), (vocab, torch.float32))
    )
    ordered, order, starts = (
        torch.empty(n, dtype=dtype, device=META)
        for n, dtype in ((tokens, torch.int16), (tokens, torch.int64), (vocab + 1, torch.int32))
    )
    distinct = vocab * (1 - (1 - 1 / vocab) ** tokens)
    pieces = tokens / table_kernel.BLOCK * (1 - distinct / tokens) * width * 4
    moved = 2 * pieces, rows.nbytes + pieces + 2 * distinct * width * 4
    launches = table_kernel.launches(rows, ordered, order, starts, total, holds=True)
    for (kernel, grid, args, options), size in zip(launches, moved, strict=True):
        name = f"table {kernel.fn.__name__}"
        used = resources_of(kernel.warmup(*args, grid=grid, **options))
        shown = ("1 a table", "x".join(map(str, grid)), table_kernel.WARPS, *used.values())
        say(" | ".join((name, *map(str, shown), f"{size / 1e6:.1f}")))
        result("training kernel", kernel=name, bytes=size, **used)


def matrix_kernels(tokens: int, outputs: int, inputs: int) -> None:
    """Print what the gradient of a matrix uses; bytes are those of its factors, pieces and sum."""
    grad, x = (
        torch.empty(tokens, side, dtype=torch.bfloat16, device=META) for side in (outputs, inputs)
    )
    total = torch.empty(outputs, inputs, device=META)
    launches = matrix_kernel.launches(grad, x, total, holds=True)
    tall, wide, _ = matrix_kernel.TILE
    tiles = launches[1][1][0]
    pieces = 4 * tall * wide * (matrix_kernel.PROGRAMS + tiles)  # at most
    moved = grad.nbytes + x.nbytes + pieces, pieces + 2 * total.nbytes
    for (kernel, grid, args, options), size in zip(launches, moved, strict=True):
        name = f"matrix {outputs} x {inputs} {kernel.fn.__name__}"
        used = resources_of(kernel.warmup(*args, grid=grid, **options))
        shown = ("1 a matrix", "x".join(map(str, grid)), matrix_kernel.WARPS, *used.values())
        say(" | ".join((name, *map(str, shown), f"{size / 1e6:.1f}")))
        result("training kernel", kernel=name, bytes=size, **used)


def resources_of(made: Any, launch: Launch | None = None, length: int = 0) -> dict[str, int]:
    """Return what a compiled kernel uses: registers, bytes spilled, of local and of shared memory,
    its global loads and stores before it waits for the previous kernel, and its instructions."""
    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"

    def output(*words: str | Path) -> str:
        ended = subprocess.run(words, check=True, capture_output=True, text=True)
        return ended.stdout + ended.stderr

    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        binary = source.with_suffix(".cubin")
        report = output(tools / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", binary)
        code = output(tools / "nvdisasm", "-c", binary)

    early = made.asm["ptx"].partition("griddepcontrol.wait")[0]

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found[1]) if found else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "spilled": number(r"(\d+) bytes spill stores"),
        "local": number(r"(\d+) bytes stack frame"),
        "shared": made.metadata.shared,
        "early_loads": len(re.findall(r"\bld\.(?:volatile\.)?global|prefetch\.L2", early)),
        "early_stores": len(re.findall(r"\bst\.(?:volatile\.)?global", early)),
        **instructions_of(code, launch, length),
    }


def instructions_of(code: str, launch: Launch | None, length: int) -> dict[str, int]:
    """Return the instructions that a warp issues, of them barriers and tensor cores' products.

    Loops over a matrix's inputs or over a row's keys count as often as they are run, other loops
    and each branch once: also the attention's sum of all parts, which the last program adds up.
    """
    lines: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?(.*?);", line):
            lines.append(found[1])
            jump = re.match(r"BRA.*`\((\.L\w+)\)", found[1])
            if jump and jump[1] in labels:
                loops.append(lines[labels[jump[1]] :])

    def count(lines: list[str], pattern: str) -> int:
        return sum(bool(re.match(pattern, line)) for line in lines)

    patterns = {"instructions": "", "barriers": "BAR", "tensor": "[HQ]G?MMA"}
    found = {name: count(lines, pattern) for name, pattern in patterns.items()}
    if launch is None or not (tensor := found["tensor"]):
        return found
    products = tensor_products(launch, tensor, length)
    for body in loops:
        if inside := count(body, patterns["tensor"]):
            for name, pattern in patterns.items():
                found[name] += (products - tensor) // inside * count(body, pattern)
    return found


def tensor_products(launch: Launch, in_code: int, length: int) -> int:
    """Return how many products a warp has tensor cores do; in_code: those in its code."""
    c = launch.constants
    if launch.kernel is attention.attend:
        window = dict(zip(launch.kernel.arg_names, launch.args, strict=False))["window"]
        # The first keys are multiplied before the loop, in half of the code's products.
        return -(-min(length, window) // (c["S"] * c["BK"])) * (in_code // 2)
    # A product has 16 inputs, 16 outputs and 8 rows.
    inputs = -(-c["K"] // c["KP"]) * c["KP"] // launch.num_warps
    return inputs // 16 * (c["BN"] // 16) * (c["RB"] // 8)


if __name__ == "__main__":
    main()
