"""Compile the functions marked `fused` for an H100 or H200, without having one.

    python -m bench.gpu.fused_functions

For the loss of 16,384 tokens in one block (vocabulary 32,768; torch counts no tensor above 10^9
elements) and the optimizer's step at depth 12: each function's kernels, the bytes that they read
and write at least, and of each kernel the registers and spilled bytes that ptxas reports. It needs
what `generated_code` needs.
"""

import contextlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from bench.gpu import generated_code
from bench.gpu.cuda_stub import with_stub
from bench.gpu.report import result, say
from nanochat_core.model import fp8, loss
from nanochat_core.optim import adamw, muon

TOKENS, VOCABULARY = 16384, 32768
WIDTH = 768
HEADER = """import triton, triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


def main() -> None:
    """Start again with the library that stands in for CUDA's, and print a line a function."""
    if torch.version.cuda is None:
        raise SystemExit("this torch is not built for CUDA; hint: pip install torch==2.11.0")
    with tempfile.TemporaryDirectory() as directory:
        if "--stubbed" not in sys.argv:
            words = (sys.executable, "-m", "bench.gpu.fused_functions", "--stubbed")
            environment = with_stub(Path(directory))
            sys.exit(subprocess.run(words, env=environment, check=False).returncode)
        for name, counted, code in compiled():
            kernels = list(machine_code(code, Path(directory)))
            gigabytes = counted["bytes"]["triton"] / 1e9
            registers, spilled = (max(kernel[i] for kernel in kernels) for i in (0, 1))
            result("fused", function=name, kernels=len(kernels), gb=gigabytes, spilled=spilled)
            say(
                f"{name}: {len(kernels)} kernels, {gigabytes:.2f} GB, at most {registers} "
                f"registers, {spilled} bytes spilled"
            )


def functions() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield names, functions and arguments."""

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    bf16, number = torch.bfloat16, of()
    logits, row = of(TOKENS, VOCABULARY, dtype=bf16), of(TOKENS, 1)
    target = of(TOKENS, 1, dtype=torch.int64)
    yield "loss: read", loss._read_rows, (logits, target, row, 15.0)  # pyright: ignore[reportPrivateUsage]
    yield "loss: gradient", loss._gradient_rows, (logits, row, 15.0)  # pyright: ignore[reportPrivateUsage]
    for scales, bound in (("amax", None), ("bound", number)):
        yield f"fp8, {scales}", fp8.quantise_both, (logits, fp8.E5M2, bound)
    for count, rows, columns in (
        (48, WIDTH, WIDTH),
        (12, 4 * WIDTH, WIDTH),
        (12, WIDTH, 4 * WIDTH),
    ):
        stack, moment = of(count, rows, columns), muon.second_moment_shape(rows, columns)
        shape = f"{count} of {rows} x {columns}"
        yield (f"Muon before, {shape}", muon._first_iterate,  # pyright: ignore[reportPrivateUsage]
               (stack, of(*stack.shape), number, bf16))  # fmt: skip
        yield (f"Muon after, {shape}", muon._update,  # pyright: ignore[reportPrivateUsage]
               (stack, stack.to(bf16), of(count, *moment), number, number))  # fmt: skip
    p, m, v = (of(VOCABULARY, WIDTH, dtype=bf16) for _ in range(3))
    given = p, of(VOCABULARY, WIDTH), m, v, number, number, number, 0.8, 0.95
    yield "AdamW of a table", adamw._update, given  # pyright: ignore[reportPrivateUsage]


def compiled() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each function's name, its kernels and bytes, and the generated code."""
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    made: list[tuple[dict[str, Any], str]] = []
    case = SimpleNamespace(rows=TOKENS // 2048, width_depth=WIDTH // 64, keep=None)

    def count(lowering: Any) -> Any:
        code = lowering.codegen()[0]
        counted = generated_code.count_kernels(lowering.scheduler, case)
        made.append((counted, getattr(code, "value", code)))
        raise generated_code.Generated

    with contextlib.ExitStack() as stack:
        for patch in generated_code.patches([], case):
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(GraphLowering, "compile_to_module", count))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for number, (name, function, arguments) in enumerate(functions()):
            plain = getattr(function, "__wrapped__")  # noqa: B009 - what `fused` wraps
            try:
                torch.compile(plain, dynamic=False)(*arguments)
            except Exception:  # Generated, which torch wraps in another
                if len(made) == number:
                    raise
            yield name, *made[number]


def machine_code(code: str, directory: Path) -> Iterator[tuple[int, int]]:
    """Yield the registers and the spilled bytes of each kernel, in one of torch's block sizes."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    ptxas = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "ptxas"
    for name, source in re.findall(r"async_compile.triton\('(\w+)', '''(.*?)'''", code, re.S):
        found = re.search(r"'signature': \{(.*?)\}", source)
        assert found is not None
        signature = dict(re.findall(r"'(\w+)': '([^']+)'", found[1]))
        body = source[source.index("@triton.jit") :]
        path = directory / f"{name}.py"
        path.write_text(HEADER + body)
        spec = importlib.util.spec_from_file_location(name[-40:], path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sizes = {
            k: int(v)
            for k, v in re.findall(r"(\w+(?:numel|BLOCK))(?:: tl.constexpr)? = (\d+)", body)
        }
        pointwise, flat = "triton_poi" in name, "ynumel" not in signature
        blocks = {
            "XBLOCK": (1024 if flat else 64) if pointwise else 1,
            "YBLOCK": 64,
            "R0_BLOCK": 2048,
        }
        constants = {
            k: {**blocks, **sizes}[k] for k, kind in signature.items() if kind == "constexpr"
        }
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, (k, kind) in enumerate(signature.items())
            if kind.startswith("*") or (k.endswith("numel") and kind != "constexpr")
        }
        made = triton.compile(
            ASTSource(getattr(module, name), signature, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 16 if "triton_red" in name else 4},
        )
        ptx = directory / "kernel.ptx"
        ptx.write_text(made.asm["ptx"])
        words = (ptxas, "-v", "--gpu-name=sm_90a", ptx, "-o", directory / "kernel.cubin")
        log = subprocess.run(words, capture_output=True, text=True, check=True).stderr
        used, spilled = re.search(r"Used (\d+)", log), re.search(r"(\d+) bytes spill stores", log)
        assert used is not None
        assert spilled is not None
        yield int(used[1]), int(spilled[1])


if __name__ == "__main__":
    main()
