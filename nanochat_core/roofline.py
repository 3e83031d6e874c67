"""What a GPU should reach by its data sheet: training by FLOP/s and bytes, decoding by bytes.

Training time per token is that of the matrix products, at a share of the peak, plus that of the
bytes which all other kernels move. The two shares are assumptions: they reproduce the runs that
nanochat has published for H100s within 8 % (docs/reference/gpu.md has them). Communication,
evaluation, starts and checkpoints are not counted.
"""

from dataclasses import dataclass

from nanochat_core.config import RunConfig
from nanochat_core.errors import ConfigError
from nanochat_core.runtime.hardware.gpu_specs import GPUS, GpuSpec, find_gpu_spec, nearest_gpus
from nanochat_core.scaling import (
    flops_per_token,
    num_lm_head_params,
    num_matrix_params,
    num_params,
)

PRODUCT_SHARE = {"bf16": 0.60, "fp8": 0.47}  # of the peak FLOP/s of that format
READ_SHARE = 0.9  # of the memory's bandwidth
# What kernels other than products and attention move: values of 2 bytes and of the model's width,
# per token and layer, forward and backward; and bytes per token and word of the vocabulary. Those
# of nanochat's generated code, from which the shares were fitted.
LAYER_VALUES = {"bf16": 76.9, "fp8": 108.3}
WORD_BYTES = {"bf16": 7.7, "fp8": 18.0}
# Of a parameter in training, on each GPU: its working copy and gradient; and divided among all
# GPUs: its fp32 master and the optimizer's moments. Counted at depth 4 in bf16.
COPIED_BYTES, SHARED_BYTES = 6.0, 6.3
# Activations, in rows of 2 bytes a channel for each token and layer: what those parameters left of
# the memory that depth 12 took on an H100.
ACTIVATION_ROWS = 20.3


@dataclass(frozen=True, kw_only=True)
class Training:
    """Pretraining on one GPU, or on several that share the batch."""

    tokens_per_second: float  # of each GPU
    mfu: float  # of the peak in bf16
    gpu_seconds: float  # of all tokens, added over the GPUs


def pretraining(run: RunConfig, gpu: GpuSpec, precision: str) -> Training | None:
    """Return the pace of stage `pretrain`; None if it is not known: in fp32, or without fp8."""
    peak = {"bf16": gpu.bf16, "fp8": gpu.fp8}.get(precision)
    if peak is None:
        return None
    model = run.model
    total = flops_per_token(model, run.numerics)
    # Attention is computed in bf16 also where products are in fp8.
    attention = sum(12 * model.width * min(w, model.sequence_len) for w in model.windows)
    seconds = (total - attention) / (peak * PRODUCT_SHARE[precision])
    seconds += attention / (gpu.bf16 * PRODUCT_SHARE["bf16"])
    moved = 2 * LAYER_VALUES[precision] * model.depth * model.width
    moved += WORD_BYTES[precision] * model.vocab_size
    seconds += moved / (gpu.bandwidth * READ_SHARE)
    return Training(
        tokens_per_second=1 / seconds,
        mfu=total / seconds / gpu.bf16,
        gpu_seconds=run.pretrain.num_steps * run.pretrain.total_batch_size * seconds,
    )


def most_decoded(run: RunConfig, gpu: GpuSpec) -> float:
    """Return tokens per second of one answer in bf16 that no GPU of this kind exceeds.

    A step reads every matrix once; keys and values, fewer for short answers, are not counted.
    """
    matrices = num_matrix_params(run.model, run.numerics) + num_lm_head_params(run.model)
    return gpu.bandwidth / (2 * matrices)


def training_bytes(run: RunConfig, gpus: int, *, rows: int = 1) -> float:
    """Return the bytes that pretraining takes on each of `gpus`, with `rows` in a micro-step.

    An estimate in bf16: parameters with their gradient and moments, activations, and logits. What
    CUDA and its compiler take, half a gigabyte or more, is not in it.
    """
    model, tokens = run.model, rows * run.model.sequence_len
    states = (COPIED_BYTES + SHARED_BYTES / gpus) * num_params(model, run.numerics)
    activations = 2 * ACTIVATION_ROWS * model.depth * model.width * tokens
    return states + activations + 2 * model.vocab_size * tokens


def named_gpu(name: str) -> GpuSpec:
    """Return the GPU of the table that a person calls `name`. Raises ConfigError if none is."""
    spec = find_gpu_spec(name)
    if spec is None:
        near = nearest_gpus(name) or [spec.name for spec in GPUS]
        raise ConfigError(
            f"there are no figures of a GPU '{name}'", hint=f"one of: {', '.join(near)}"
        )
    return spec
