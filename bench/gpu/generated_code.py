"""Count what torch's compiler generates for an H100 or H200, without having one.

    python -m bench.gpu.generated_code [--nanochat DIR] [--precision bf16 fp8] [--compile blocks]

Compiles a training pass of our model, and of nanochat's with the same attention operation in place
of its own, at two depths, and prints what a layer adds: kernels, and the bytes that they read and
write at least, in rows of C bf16 numbers for each token (C: the model's width). Products of
matrices and attention are counted, but not their bytes. Nothing is run: tensors have no memory, and
a library without functions stands in for CUDA's. It needs torch built for CUDA (pip's, for Linux)
and a C compiler; a case takes up to two minutes of a CPU. Not counted: our loss, which is not in
the compiled pass. nanochat's is, under `once`. With `--compile blocks` what runs between the graphs
is not counted either.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench.gpu.cuda_stub import Driver, with_stub
from bench.gpu.report import result, say

DEPTHS = 2, 4  # an even number of layers apart: every second one has a value embedding
PASSES = "forward", "backward"
KINDS = "triton", "product", "attention", "other"
MULTIPROCESSORS = 132  # of an H100 SXM and an H200


def main() -> None:
    """Compile all cases, each in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description="What torch's compiler generates for sm_90.")
    parser.add_argument("--nanochat", type=Path, help="its checkout; else only ours")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp8"), default=["bf16", "fp8"])
    parser.add_argument("--width-depth", type=int, default=24, help="the depth that has the width")
    parser.add_argument("--rows", type=int, default=16, help="of 2,048 tokens")
    parser.add_argument("--depths", type=int, nargs=2, default=DEPTHS)
    parser.add_argument("--fp8-scales", choices=("amax", "bound"), default="amax")
    parser.add_argument("--compile", choices=("whole", "blocks"), default="whole", help="ours")
    parser.add_argument("--qk-kernel", action="store_true", help="of our placement")
    parser.add_argument("--weight-kernel", action="store_true", help="likewise, in bf16")
    parser.add_argument("--keep", type=Path, help="write the generated code into this directory")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(compile_case(SimpleNamespace(**json.loads(options.case)))))
        return
    if torch.version.cuda is None:
        raise SystemExit("this torch is not built for CUDA; hint: pip install torch==2.11.0")
    say(f"torch {torch.__version__}, sm_90, rows {options.rows}; not run on a GPU")
    with tempfile.TemporaryDirectory() as directory:
        environment = with_stub(Path(directory))
        for precision in options.precision:
            for side in ("ours", "nanochat") if options.nanochat else ("ours",):
                few, many = (
                    run_case(environment, options, side, precision, depth)
                    for depth in options.depths
                )
                show(side, precision, few, many, options.depths[1] - options.depths[0])


def run_case(
    environment: Mapping[str, str], options: Any, side: str, precision: str, depth: int
) -> dict[str, Any]:
    """Compile one model in a process of its own; return what it counted."""
    case = {
        "side": side,
        "precision": precision,
        "depth": depth,
        "width_depth": options.width_depth,
        "rows": options.rows,
        "nanochat": str(options.nanochat),
        "fp8_scales": options.fp8_scales,
        "qk_kernel": options.qk_kernel,
        "weight_kernel": options.weight_kernel,
        "by_block": options.compile == "blocks",
        "keep": str(options.keep) if options.keep else None,
    }
    words = (sys.executable, "-m", "bench.gpu.generated_code", "--case", json.dumps(case))
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{side} {precision} at depth {depth} ended with\n{ended.stderr[-3000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def show(side: str, precision: str, few: dict[str, Any], many: dict[str, Any], layers: int) -> None:
    """Print and report what a layer adds, and what is there without layers."""
    for name, a, b in ((name, few[name], many[name]) for name in PASSES):
        kernels = {kind: (b["kernels"][kind] - a["kernels"][kind]) / layers for kind in KINDS}
        rows = {kind: (b["bytes"][kind] - a["bytes"][kind]) / layers / b["row"] for kind in KINDS}
        fixed = (a["bytes"]["triton"] - few["depth"] * rows["triton"] * a["row"]) / 1e9
        result("generated code", side=side, precision=precision, direction=name, kernels=kernels,
               rows=rows, fixed_gb=fixed)  # fmt: skip
        say(
            f"{side} {precision} {name}, a layer: {rows['triton']:.1f} rows in "
            f"{kernels['triton']:.1f} Triton kernels; {rows['other']:.1f} rows in "
            f"{kernels['other']:.1f} others; {kernels['product']:.1f} products | "
            f"once: {fixed:.1f} GB | graphs: {few['graphs']}, {many['graphs']}"
        )


def compile_case(case: Any) -> dict[str, Any]:
    """Compile a training pass of one model; return kernels and bytes of both directions."""
    passes: list[dict[str, Any]] = []  # of each graph in turn, forward and backward
    with contextlib.ExitStack() as stack:
        for patch in patches(passes, case):
            stack.enter_context(patch)
        from torch._subclasses.fake_tensor import FakeTensorMode

        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        if case.side == "ours":
            our_pass(case, passes)
        else:
            nanochat_pass(case, passes)
    sums = {name: added(passes[at :: len(PASSES)]) for at, name in enumerate(PASSES)}
    return {"depth": case.depth, "graphs": len(passes) // len(PASSES), **sums}


def added(graphs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of what `count_kernels` returns of graphs."""
    of_kind = {
        name: {kind: sum(one[name][kind] for one in graphs) for kind in KINDS}
        for name in ("kernels", "bytes")
    }
    return {**of_kind, "row": graphs[0]["row"]}


def generate(
    function: Callable[..., Any], passes: list[dict[str, Any]], *args: Any, **kwargs: Any
) -> None:
    """Have torch compile a function that `torch.compile` returned, and count both directions."""
    before = len(passes)
    try:
        function(*args, **kwargs)
    except Exception:  # Generated, which torch wraps in another
        if len(passes) - before < len(PASSES):
            raise
    assert len(passes) - before == len(PASSES), "one direction was not generated"


def patches(passes: list[dict[str, Any]], case: Any) -> Iterator[Any]:
    """Yield what makes torch generate code for an H200 that is not there."""
    import torch._dynamo.device_interface as interfaces
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.post_grad as post
    import torch._subclasses.fake_tensor as fake
    from torch._inductor.graph import GraphLowering
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    properties = SimpleNamespace(
        **{"name": "NVIDIA H200", "major": 9, "minor": 0, "total_memory": 141 * 2**30},
        **{"multi_processor_count": MULTIPROCESSORS, "regs_per_multiprocessor": 65536},
        **{"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024},
        **{"warp_size": 32, "L2_cache_size": 60 * 2**20, "shared_memory_per_block": 49152},
        **{"shared_memory_per_block_optin": 232448, "gcnArchName": "", "uuid": ""},
        **{"shared_memory_per_multiprocessor": 233472, "is_multi_gpu_board": 0},
    )
    stream = mock.MagicMock(device=torch.device("cuda", 0), cuda_stream=0, stream_id=0)

    def count(lowering: Any) -> Any:
        code = lowering.codegen()[0]
        passes.append(count_kernels(lowering.scheduler, case))
        if case.keep:
            path = Path(case.keep) / f"{case.side}-{case.precision}-{case.depth}-{len(passes)}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(getattr(code, "value", code))
        if len(passes) % len(PASSES) == 0:
            raise Generated
        return SimpleNamespace(call=lambda _: None, __file__="", key="")

    driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    worker = interfaces.CudaInterface.Worker
    yield from (
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            get_device_properties=lambda _=None: properties,
            get_device_capability=lambda _=None: (9, 0),
            get_device_name=lambda _=None: properties.name,
            current_stream=lambda _=None: stream,
            synchronize=lambda _=None: None,
            set_device=lambda _: None,
            _lazy_init=lambda: None,
            get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
            set_rng_state=lambda *_: None,
        ),
        mock.patch.multiple(
            interfaces.CudaInterface,
            is_available=staticmethod(lambda: True),
            device_count=staticmethod(lambda: 1),
            current_device=staticmethod(lambda: 0),
            get_device_properties=staticmethod(lambda _=None: properties),
            get_compute_capability=staticmethod(lambda _=None: 90),
            synchronize=staticmethod(lambda _=None: None),
        ),
        mock.patch.multiple(
            worker,
            get_device_properties=staticmethod(lambda _=None: properties),
            current_device=staticmethod(lambda: 0),
        ),
        mock.patch.object(torch.accelerator, "current_stream", return_value=stream),
        mock.patch.object(fake, "init_gpu_context"),
        mock.patch.object(joint, "lazy_init"),
        mock.patch.object(post, "lazy_init"),
        mock.patch.object(GraphLowering, "compile_to_module", count),
        # Both directions at once: the backward pass is otherwise compiled when it first runs.
        functorch.patch(force_non_lazy_backward_lowering=True),
        inductor.patch(
            compile_threads=1,
            fx_graph_cache=False,
            joint_graph_constant_folding=False,
        ),
    )


class Generated(Exception):
    """Both directions have been generated."""


def count_kernels(scheduler: Any, case: Any) -> dict[str, Any]:
    """Count the launches of a generated graph and their bytes, by kind."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    kernels, moved = Counter[str](), Counter[str]()
    kinds: dict[str, str] = {}  # of what an operation outside the compiler has several outputs of
    for node in scheduler.nodes:
        if node.is_extern():
            operation = node.node
            if isinstance(operation, ir.MultiOutput):
                moved[kinds[operation.inputs[0].get_name()]] += size_of(operation)
                continue
            kind = kind_of(str(getattr(operation, "python_kernel_name", "")))
            kinds[operation.get_name()] = kind
            read = {dep.name for dep in node.read_writes.reads}
            moved[kind] += sum(size_of(V.graph.try_get_buffer(name)) for name in read)
            if not isinstance(operation.layout, ir.MultiOutputLayout | ir.NoneLayout):
                moved[kind] += size_of(operation)
            kernels[kind] += 1
        elif size := node.get_read_write_buffers_sizes():
            moved["triton"] += size
            kernels["triton"] += 1
    row = case.rows * 2048 * case.width_depth * 64 * 2
    return {"kernels": {k: kernels[k] for k in KINDS}, "bytes": {k: moved[k] for k in KINDS},
            "row": row}  # fmt: skip


def kind_of(kernel: str) -> str:
    """Return which kind an operation outside the compiler's own kernels is."""
    if "mm" in kernel or "weight_gradient" in kernel:
        return "product"
    return "attention" if "attention" in kernel else "other"


def size_of(buffer: Any) -> int:
    """Return the bytes of a buffer of the graph; 0 of what is none."""
    try:
        count = 1
        for side in buffer.get_size():
            count *= int(side)
        return count * buffer.get_dtype().itemsize
    except (AttributeError, NotImplementedError):
        return 0


def our_pass(case: Any, passes: list[dict[str, Any]]) -> None:
    """Compile our model's pass."""
    from nanochat_core.model import attention, fp8, gpt
    from nanochat_core.model.attention_cudnn import attention as cudnn
    from nanochat_core.model.gradient_sum import GradientSum
    from nanochat_core.model.layers import Embedding, Linear, refresh_fp8
    from nanochat_core.model.matrices import gradient as matrix_gradient
    from nanochat_core.model.qk_kernel import rotate_normalise
    from nanochat_core.scaling import run_for_depth, windows_for

    run = run_for_depth(case.width_depth, precision=case.precision)
    length = run.model.sequence_len
    shape = {"depth": case.depth, "windows": windows_for(case.depth, length)}
    with torch.device("meta"):
        model = gpt.GPT(
            replace(run.model, **shape), replace(run.numerics, fp8_scales=case.fp8_scales)
        )
    allocate(model, lambda p: torch.bfloat16 if p.numel() >= 1024 else p.dtype)
    adding = (Embedding, Linear) if case.weight_kernel else Embedding
    for module in model.modules():
        if isinstance(module, adding):
            module.gradient_sum = GradientSum(torch.device("cuda"), mock.Mock(), mock.Mock())
    attention._call = cudnn  # pyright: ignore[reportPrivateUsage] - `choose` would try it
    if case.weight_kernel:
        matrix_gradient.DEVICES.add("cuda")
    if case.qk_kernel:
        attention._qk_kernel = rotate_normalise  # pyright: ignore[reportPrivateUsage]
    tokens = torch.zeros(case.rows, length, dtype=torch.int64, device="cuda")
    if case.precision == "fp8":
        with mock.patch.object(fp8.Quantised, "refresh"):
            refresh_fp8(model)
    compiled_by_shape = gpt.compiled_by_shape

    def counted(part: Callable[..., Any], options: Any) -> Callable[..., Any]:
        compiled = compiled_by_shape(part, options)

        def call(*args: Any) -> Any:
            generate(compiled, passes, *args)
            with torch.compiler.set_stance("force_eager"):  # what it calls is compiled functions
                return part(*args)  # the shapes of its outputs

        return call

    with mock.patch.object(gpt, "compiled_by_shape", counted):
        model.compile_passes(by_block=case.by_block)
    model._compiled(tokens)  # pyright: ignore[reportPrivateUsage, reportOptionalCall]


def nanochat_pass(case: Any, passes: list[dict[str, Any]]) -> None:
    """Compile nanochat's pass, with its loss, which it compiles too."""
    sys.path.insert(0, case.nanochat)
    import nanochat.gpt as peer  # pyright: ignore[reportMissingImports]

    from nanochat_core.model.attention_cudnn import attention as cudnn
    from nanochat_core.scaling import model_for_depth

    def attend(q: Any, k: Any, v: Any, *, causal: bool, window_size: tuple[int, int]) -> Any:
        last = q.size(1) - 1
        return cudnn(q, k, v, last if window_size[0] < 0 else min(window_size[0], last))

    peer.flash_attn = SimpleNamespace(flash_attn_func=attend)
    config = model_for_depth(case.width_depth)
    length = config.sequence_len
    with torch.device("meta"):
        model = peer.GPT(
            peer.GPTConfig(
                sequence_len=length,
                vocab_size=config.vocab_size,
                n_layer=case.depth,
                n_head=config.num_heads,
                n_kv_head=config.num_kv_heads,
                n_embd=config.width,
                window_pattern="SSSL",
            )
        )
    tables = {id(e.weight) for e in (model.transformer.wte, *model.value_embeds.values())}
    allocate(model, lambda p: torch.bfloat16 if id(p) in tables else p.dtype)
    half = config.width // config.num_heads // 2
    for name in ("cos", "sin"):
        table = torch.empty(1, 10 * length, 1, half, dtype=torch.bfloat16, device="cuda")
        setattr(model, name, table)
    if case.precision == "fp8":
        import nanochat.fp8 as peer_fp8  # pyright: ignore[reportMissingImports]

        def eligible(module: nn.Module, _: str) -> bool:  # the rule of its scripts/base_train.py
            if not isinstance(module, nn.Linear):
                return False
            sides = module.in_features, module.out_features
            return all(side % 16 == 0 for side in sides) and min(sides) >= 128

        recipe = peer_fp8.Float8LinearConfig.from_recipe_name("tensorwise")
        peer_fp8.convert_to_float8_training(model, config=recipe, module_filter_fn=eligible)
    tokens = torch.zeros(case.rows, length, dtype=torch.int64, device="cuda")
    generate(torch.compile(model, dynamic=False), passes, tokens, tokens)


def allocate(model: nn.Module, dtype: Any) -> None:
    """Give a model on the meta device parameters on the GPU, without memory."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):  # pyright: ignore[reportPrivateUsage]
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=dtype(parameter), device="cuda")
                module.register_parameter(name, nn.Parameter(empty))


if __name__ == "__main__":
    main()
