"""Attention by cuDNN's graph interface (package `nvidia-cudnn-frontend`), whose sliding windows
torch's own cuDNN attention does not expose. See attention_backends.py.

Graphs are built once per shape and cached.

Shapes: B rows, T tokens, H query heads, K key/value heads, D head dim.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# (shape, stride) of a tensor as cuDNN sees it
Layout = tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=1)
def frontend() -> Any:
    """Import and return the optional package. Raises ImportError where it is missing."""
    import cudnn  # pyright: ignore[reportMissingImports]

    return cudnn  # pyright: ignore[reportUnknownVariableType]


def attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Compute attention: q (B, T, H, D), k, v (B, T, K, D), bf16 or fp16 -> (B, T, H, D)."""
    # The transposes are views: cuDNN is given (B, H, T, D) by strides, nothing is copied.
    return forward(*(t.contiguous().transpose(1, 2) for t in (q, k, v)), window)[0].transpose(1, 2)


@torch.library.custom_op("nanochat_flows::cudnn_attention", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, D) and the softmax statistics (B, H, T, 1) fp32.

    The statistics (log-sum-exp per query) are what the backward pass needs.
    """
    out, stats = _empty_outputs(q)
    plan = _forward_plan(_layouts(q, k, v, out, stats), q.dtype, window)
    plan.run(q, k, v, out, stats)
    return out, stats


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    return _empty_outputs(q)


@torch.library.custom_op("nanochat_flows::cudnn_attention_backward", mutates_args=())
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    if grad.stride(-1) != 1:  # any other order of its dimensions is described by strides
        grad = grad.contiguous()
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    plan = _backward_plan(_layouts(q, k, v, out, grad, stats), q.dtype, window)
    plan.run(q, k, v, out, grad, stats, *gradients)
    return gradients


@backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, grad: Tensor, grad_stats: Tensor | None) -> tuple[Tensor | None, ...]:
    return *backward(grad, *ctx.saved_tensors, ctx.window), None


forward.register_autograd(_gradients, setup_context=_save)


class _Plan:
    """A built cuDNN graph and its tensors, in the order in which `run` takes them."""

    def __init__(self, graph: Any, tensors: list[Any]) -> None:
        # cuDNN's required order. FALLBACK adds plans for shapes that heuristic A does not cover.
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([frontend().heur_mode.A, frontend().heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self._graph, self._tensors = graph, tensors

    def run(self, *tensors: Tensor) -> None:
        device = tensors[0].device
        space = torch.empty(self._graph.get_workspace_size(), dtype=torch.uint8, device=device)
        handle = _handle(device.index or 0)
        # A handle remembers its stream, and torch may have changed the current one since.
        frontend().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        self._graph.execute(dict(zip(self._tensors, tensors, strict=True)), space, handle=handle)


@lru_cache(maxsize=32)
def _forward_plan(layouts: tuple[Layout, ...], dtype: torch.dtype, window: int) -> _Plan:
    graph = _graph(dtype)
    *inputs, out_layout, stats_layout = layouts
    q, k, v = (_tensor(graph, layout, dtype) for layout in inputs)
    options = {"name": "attention", "generate_stats": True, **_band(layouts[0], window)}
    out, stats = graph.sdpa(q=q, k=k, v=v, **options)
    _set_output(out, out_layout)
    _set_output(stats, stats_layout).set_data_type(frontend().data_type.FLOAT)
    return _Plan(graph, [q, k, v, out, stats])


@lru_cache(maxsize=32)
def _backward_plan(layouts: tuple[Layout, ...], dtype: torch.dtype, window: int) -> _Plan:
    graph = _graph(dtype)
    *inputs, stats_layout = layouts
    q, k, v, out, grad = (_tensor(graph, layout, dtype) for layout in inputs)
    stats = _tensor(graph, stats_layout, torch.float32)
    options = {"name": "attention_backward", **_band(layouts[0], window)}
    gradients = graph.sdpa_backward(q=q, k=k, v=v, o=out, dO=grad, stats=stats, **options)
    for gradient, layout in zip(gradients, layouts[:3], strict=True):
        _set_output(gradient, layout)
    return _Plan(graph, [q, k, v, out, grad, stats, *gradients])


def _band(q: Layout, window: int) -> dict[str, Any]:
    """Return the mask and scale options: causal, and a left bound if the window hides keys."""
    # cuDNN's bound counts the keys a query sees, itself included: W to the left and its own, W + 1.
    length, head_dim = q[0][2], q[0][3]
    return {
        "attn_scale": 1.0 / math.sqrt(head_dim),
        "diagonal_alignment": frontend().diagonal_alignment.TOP_LEFT,
        "diagonal_band_left_bound": window + 1 if window < length - 1 else None,
        "diagonal_band_right_bound": 0,
    }


def _graph(dtype: torch.dtype) -> Any:
    single = frontend().data_type.FLOAT
    return frontend().pygraph(
        io_data_type=_data_type(dtype),
        intermediate_data_type=single,
        compute_data_type=single,
        handle=_handle(torch.cuda.current_device()),
    )


@lru_cache(maxsize=16)
def _handle(index: int) -> Any:
    with torch.cuda.device(index):
        return frontend().create_handle()


def _data_type(dtype: torch.dtype) -> Any:
    names = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT"}
    return getattr(frontend().data_type, names[dtype])


def _tensor(graph: Any, layout: Layout, dtype: torch.dtype) -> Any:
    return graph.tensor(dim=list(layout[0]), stride=list(layout[1]), data_type=_data_type(dtype))


def _set_output(tensor: Any, layout: Layout) -> Any:
    return tensor.set_output(True).set_dim(list(layout[0])).set_stride(list(layout[1]))


def _layouts(*tensors: Tensor) -> tuple[Layout, ...]:
    return tuple((tuple(tensor.shape), tuple(tensor.stride())) for tensor in tensors)


def _empty_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, length, head_dim = q.shape
    # Laid out as (B, T, H, D) in memory, so that the heads can be joined without a copy.
    out = q.new_empty(rows, length, heads, head_dim).transpose(1, 2)
    return out, q.new_empty(rows, heads, length, 1, dtype=torch.float32)
