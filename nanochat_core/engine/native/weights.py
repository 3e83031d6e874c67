"""A model's weights as the compiled kernels read them: cast, joined, padded and packed once.

Widths are padded to multiples of 16 with zeros, heads to two halves of such a multiple, because
rotary positions rotate channel j of the first half with channel j of the second. The structures are
those of kernels_spec.h; their pointers lead into tensors that live as long as `NativeWeights`.

Shapes: N outputs, K inputs of a matrix, C width, D head dim, E padded head dim, V vocabulary.
"""

import ctypes
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from nanochat_core.config import ModelConfig
from nanochat_core.engine.native.memory import Arena
from nanochat_core.errors import ModelError
from nanochat_core.model.gpt import GPT, Attention, Block
from nanochat_core.model.layers import Embedding, rotary_table
from nanochat_core.model.shape import head_dim, value_embed_layers

Precision: TypeAlias = Literal["fp32", "bf16", "int8"]

FORMS: tuple[Precision, ...] = ("fp32", "bf16", "int8")  # their index is the kernels' number
PANEL = 16  # outputs that are stored together
PAGE_SIZE = 16

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_DEPTHS = {"fp32": 1, "bf16": 2, "int8": 4}  # inputs that are stored together: 32 bits


class MatrixSpec(ctypes.Structure):
    """A matrix as the kernels read it: Matrix of kernels_matrix.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("panels", ctypes.c_int32),
        ("steps", ctypes.c_int32),
    )


class LayerSpec(ctypes.Structure):
    """A layer as the kernels read it: LayerSpec of kernels_spec.h."""

    _fields_ = (
        ("qkv", MatrixSpec),
        ("attention_out", MatrixSpec),
        ("fc", MatrixSpec),
        ("mlp_out", MatrixSpec),
        ("value_embed", ctypes.c_void_p),
        ("group", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("resid", ctypes.c_float),
        ("x0", ctypes.c_float),
        ("value_embed_size", ctypes.c_size_t),
    )


def padded(count: int) -> int:
    """Round up to a multiple of 16."""
    return -(-count // PANEL) * PANEL


def padded_head(config: ModelConfig) -> int:
    """Return the channels of a head in the kernels: two halves, each padded."""
    return 2 * padded(head_dim(config) // 2)


def kept_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype of keys, values and embedding tables."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


class PackedMatrix:
    """A matrix (N, K) as [N/16][K/depth][16][depth]; int8 with a scale for each output."""

    def __init__(self, num_out: int, num_in: int, precision: Precision, arena: Arena) -> None:
        self.shape = (padded(num_out), padded(num_in))
        self.precision: Precision = precision
        depth = _DEPTHS[precision]
        self.data = arena.zeros(
            (self.shape[0] // PANEL, self.shape[1] // depth, PANEL, depth),
            _DTYPES[precision],
        )
        self.scales = torch.ones(self.shape[0])
        self.sums = torch.zeros(self.shape[0], dtype=torch.int32)

    def fill(self, matrix: Tensor) -> None:
        """Pack `matrix` (at most N, at most K), fp32; the rest is zeros."""
        whole = torch.zeros(self.shape)
        whole[: matrix.size(0), : matrix.size(1)] = matrix
        if self.precision == "int8":
            peaks = whole.abs().amax(dim=1)
            # Symmetric, a scale per output. 127 and not 128, so that -127 to 127 is used alike.
            self.scales.copy_(torch.where(peaks > 0, peaks / 127, 1.0))
            whole = (whole / self.scales[:, None]).round_()
            # The kernels multiply unsigned activations with signed weights (VNNI); the row sums
            # undo the offset that makes activations unsigned.
            self.sums.copy_(whole.sum(dim=1, dtype=torch.float64))
        panels, steps, _, depth = self.data.shape
        self.data.copy_(whole.view(panels, PANEL, steps, depth).transpose(1, 2))

    def spec(self) -> MatrixSpec:
        """Return the structure that the kernels read."""
        return MatrixSpec(
            data=self.data.data_ptr(),
            scales=self.scales.data_ptr(),
            sums=self.sums.data_ptr(),
            panels=self.data.size(0),
            steps=self.data.size(1),
        )


def check_parameters(model: GPT) -> None:
    """Raise ModelError unless every parameter has the shape that the config gives it, and a dtype
    that is read here: what is packed from others would be read beyond its end."""
    # On "meta": shapes without memory.
    with torch.device("meta"):
        expected = GPT(model.config, model.numerics).state_dict()
    actual = model.state_dict()
    for name in sorted(expected.keys() | actual.keys()):
        found, right = actual.get(name), expected.get(name)
        if found is None or right is None or found.shape != right.shape:
            raise ModelError(f"the parameter {name} does not fit the model's config")
        if found.dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(f"the parameter {name} is {found.dtype}, expected fp32 or bf16")


@dataclass(frozen=True, kw_only=True)
class NativeLayerWeights:
    """One block's weights."""

    qkv: PackedMatrix  # queries, keys, values, and the gate of the value embedding
    attention_out: PackedMatrix
    fc: PackedMatrix
    mlp_out: PackedMatrix
    value_embed: Tensor | None  # (V, K * E)


class NativeWeights:
    """All weights of `model` that a pass reads."""

    def __init__(self, model: GPT, *, precision: Precision, max_len: int) -> None:
        config = model.config
        check_parameters(model)
        self.model, self.config = model, config
        self.head, self.padded_head = head_dim(config), padded_head(config)
        width, wide = padded(config.width), padded(4 * config.width)
        kv_width = config.num_kv_heads * self.padded_head
        q_width = config.num_heads * self.padded_head
        kept = kept_dtype(precision)
        gated = value_embed_layers(config)
        arena = Arena()
        self.layers = [
            NativeLayerWeights(
                qkv=PackedMatrix(
                    q_width + 2 * kv_width + (config.num_kv_heads if layer in gated else 0),
                    width,
                    precision,
                    arena,
                ),
                attention_out=PackedMatrix(width, q_width, precision, arena),
                fc=PackedMatrix(wide, width, precision, arena),
                mlp_out=PackedMatrix(width, wide, precision, arena),
                value_embed=(
                    torch.zeros((config.vocab_size, kv_width), dtype=kept)
                    if layer in gated
                    else None
                ),
            )
            for layer in range(config.depth)
        ]
        self.lm_head = PackedMatrix(config.vocab_size, width, precision, arena)
        self.embedding = torch.zeros((config.vocab_size, width), dtype=kept)
        self.smear_gate = torch.zeros(model.numerics.smear_channels) if config.smear else None
        cos, sin = rotary_table(max_len, self.head, model.numerics, torch.device("cpu"))
        self.cos, self.sin = (self._half(table[:, 0].float()) for table in (cos, sin))
        self.specs = (LayerSpec * config.depth)()
        self.smear_lambda = self.backout_lambda = 0.0
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Load the model's current parameters, in place."""
        model, config = self.model, self.config
        self.embedding[:, : config.width] = model.transformer.wte.weight[: config.vocab_size]
        self.lm_head.fill(model.lm_head.weight[: config.vocab_size].float())
        for layer, (block, weights) in enumerate(
            zip(model.transformer.h, self.layers, strict=True)
        ):
            assert isinstance(block, Block)
            self._fill_layer(layer, block, weights)
        if config.smear and self.smear_gate is not None:
            self.smear_gate.copy_(model.smear_gate.weight[0])
            self.smear_lambda = float(model.smear_lambda)
        if config.backout:
            self.backout_lambda = float(model.backout_lambda)

    def _fill_layer(self, layer: int, block: Block, weights: NativeLayerWeights) -> None:
        attn: Attention = block.attn
        # One matrix for all that reads the normalised input; the kernels split its outputs in this
        # order.
        parts = [self._rows(m.weight) for m in (attn.c_q, attn.c_k, attn.c_v)]
        if weights.value_embed is not None:
            table = self.model.value_embeds[str(layer)]
            assert isinstance(table, Embedding)
            rows = table.weight[: self.config.vocab_size].float()
            weights.value_embed.copy_(self._columns(rows))
            # The gate reads the first channels only: zeros let it share the matrix of q, k and v.
            gate = torch.zeros((self.config.num_kv_heads, self.config.width))
            gate[:, : self.model.numerics.gate_channels] = attn.ve_gate.weight
            parts.append(gate)
        weights.qkv.fill(torch.cat(parts))
        weights.attention_out.fill(self._columns(attn.c_proj.weight.float()))
        weights.fc.fill(block.mlp.c_fc.weight.float())
        weights.mlp_out.fill(block.mlp.c_proj.weight.float())
        spec = self.specs[layer]
        spec.qkv, spec.attention_out = weights.qkv.spec(), weights.attention_out.spec()
        spec.fc, spec.mlp_out = weights.fc.spec(), weights.mlp_out.spec()
        if weights.value_embed is not None:
            spec.value_embed = weights.value_embed.data_ptr()
            spec.value_embed_size = weights.value_embed.numel()
        if self.config.residual_scalars:
            spec.resid = float(self.model.resid_lambdas[layer])
            spec.x0 = float(self.model.x0_lambdas[layer])

    def _rows(self, matrix: Tensor) -> Tensor:
        """Pad each head's rows: (heads * D, C) -> (heads * E, C)."""
        return self._columns(matrix.float().t()).t()

    def _columns(self, matrix: Tensor) -> Tensor:
        """Pad each head's columns: (M, heads * D) -> (M, heads * E)."""
        halves = matrix.reshape(len(matrix), -1, self.head // 2)
        return self._half(halves).flatten(1)

    def _half(self, x: Tensor) -> Tensor:
        """Pad half a head with zeros: (..., D / 2) -> (..., E / 2)."""
        out = x.new_zeros((*x.shape[:-1], self.padded_head // 2))
        out[..., : self.head // 2] = x
        return out
