"""A model's weights laid out for decoding: cast once, matrices joined, constants folded.

Apart from rounding, none of this changes a result:

- q, k, v and the value embedding's gate are one matrix (the gate's reads the first few channels
  only: its other columns are zeros).
- The channels of q and k are reordered in pairs, so that rotary positions are one complex
  product. Dot products of q and k do not depend on the order.
- `qk_scale` of q and of k goes into the softmax's scale.
- The embedding table is normalised once. Smear's gate is a function of the token alone, and so
  becomes one number a token.

Shapes: N tokens, C width, H query heads, K key/value heads, D head dim, V vocabulary, P positions.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.config import ModelConfig
from nanochat_core.model.gpt import GPT, Attention, Block
from nanochat_core.model.layers import Embedding, rms_norm, rotary_table
from nanochat_core.model.shape import head_dim, padded_vocab_size, value_embed_layers

BLOCK = 128  # outputs of a bf16 matrix on a CPU that are stored together
FEW_ROWS = 2  # up to so many rows are faster one by one


class Matrix:
    """A matrix (num_out, num_in) to multiply with, laid out for few rows of input.

    `plain`: as it is, (num_out, num_in). Else, for torch on a CPU, where a product with one row is
    far from what the memory gives, in one of two ways (times of 2026-11, MKL and oneDNN, one
    thread, from main memory):

    - fp32: transposed where it is tall, 1.6 times as fast as not.
    - bf16: blocks of BLOCK outputs, in each of which the inputs' rows follow each other. One row of
      input is then a weighted sum of table rows, for which torch has a kernel that streams
      (`embedding_bag`): 2 to 3 times as fast. Many rows are a batch of products, as fast as one.
    """

    def __init__(
        self, num_in: int, num_out: int, *, dtype: torch.dtype, device: torch.device, plain: bool
    ) -> None:
        self.num_in, self.num_out = num_in, num_out
        self.transposed = not plain and dtype == torch.float32 and num_out > num_in
        self.blocked = not plain and dtype == torch.bfloat16
        shape = (num_in, num_out) if self.transposed else (num_out, num_in)
        if self.blocked:
            shape = (-(-num_out // BLOCK), num_in, BLOCK)
        # Zeros, because the last block may have fewer outputs than BLOCK.
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def fill(self, weight: Tensor) -> None:
        """Copy a weight (num_out, num_in) of any dtype in."""
        if not self.blocked:
            self.values.copy_(weight.t() if self.transposed else weight)
            return
        whole, rest = divmod(self.num_out, BLOCK)
        blocks = weight[: whole * BLOCK].unflatten(0, (whole, BLOCK))
        self.values[:whole].copy_(blocks.transpose(1, 2))
        if rest:
            self.values[whole, :, :rest].copy_(weight[whole * BLOCK :].t())

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x (N, num_in) of any dtype; returns (N, num_out) in x's dtype."""
        y = x.to(self.values.dtype)
        if self.blocked:
            y = self._sum_rows(y) if len(y) <= FEW_ROWS else y @ self.values
            # (blocks, N, BLOCK)
            return y.to(x.dtype).transpose(0, 1).reshape(len(x), -1)[:, : self.num_out]
        y = y @ self.values if self.transposed else F.linear(y, self.values)
        return y.to(x.dtype)

    def _sum_rows(self, x: Tensor) -> Tensor:
        blocks, count = len(self.values), len(x)
        shares = x.expand(blocks, count, self.num_in).reshape(-1, self.num_in)
        places = _bags(blocks, count, self.num_in)
        table = self.values.flatten(0, 1)
        # Bag (block, row) is the sum of the block's table rows, weighted by the row of input.
        y = F.embedding_bag(places, table, mode="sum", per_sample_weights=shares)
        return y.view(blocks, count, BLOCK)


@lru_cache(maxsize=64)
def _bags(blocks: int, count: int, num_in: int) -> Tensor:
    """Return the indices of the table rows in each block's sum, once for each row of input."""
    rows = torch.arange(blocks * num_in, dtype=torch.int32).view(blocks, 1, num_in)
    return rows.expand(blocks, count, num_in).reshape(-1, num_in)


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One block's matrices."""

    qkv: Matrix  # H * D of q, K * D of k, K * D of v, and K of the gate where there is one
    out: Matrix
    up: Matrix
    down: Matrix
    value_embed: Tensor | None  # (V, K * D)


class Weights:
    """All weights of `model` in `dtype`, for activations in `stream_dtype`. plain: see `Matrix`.

    Tables that are in `dtype` already are the model's own, not copies. `refresh` rewrites all
    others in place: CUDA graphs, which captured their addresses, stay valid.
    """

    def __init__(
        self,
        model: GPT,
        *,
        dtype: torch.dtype,
        stream_dtype: torch.dtype,
        max_len: int,
        plain: bool,
    ) -> None:
        config, numerics = model.config, model.numerics
        device = model.lm_head.weight.device
        self.model = model
        self.config, self.numerics = config, numerics
        self.dtype, self.stream_dtype = dtype, stream_dtype
        dim = head_dim(config)
        self.head_dim = dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.softmax_scale = numerics.qk_scale**2 / math.sqrt(dim)
        kv_width, width = config.num_kv_heads * dim, config.width
        gated = value_embed_layers(config)

        def matrix(num_in: int, num_out: int) -> Matrix:
            return Matrix(num_in, num_out, dtype=dtype, device=device, plain=plain)

        self.layers = [
            LayerWeights(
                # An even number of outputs: pairs of them are read as complex numbers.
                qkv=matrix(width, width + 2 * kv_width + (layer in gated) * _even(config)),
                out=matrix(width, width),
                up=matrix(width, 4 * width),
                down=matrix(4 * width, width),
                value_embed=self._table(_value_embed(model, layer)) if layer in gated else None,
            )
            for layer in range(config.depth)
        ]
        self.head = matrix(width, config.vocab_size)
        vocab = padded_vocab_size(config)
        stream = {"dtype": stream_dtype, "device": device}
        self.embed = torch.empty(vocab, width, dtype=dtype, device=device)  # normalised
        self.smear = torch.empty(vocab, 1, **stream) if config.smear else None
        # fp32, as in a compiled training step: in bf16 each would be off by up to 0.4 %.
        self.resid = self.first = None
        if config.residual_scalars:
            self.resid = torch.empty(config.depth, 1, device=device)
            self.first = torch.empty(config.depth, 1, 1, device=device)
        self.backout = torch.empty(1, **stream) if config.backout else None  # negated
        cos, sin = rotary_table(max_len, dim, numerics, device)  # in the model's own dtype
        # Channel j rotates with channel j + D/2, clockwise: hence the minus.
        self.rotary = torch.complex(cos.float(), -sin.float())  # (P, 1, D/2)
        self.refresh()

    @torch.inference_mode()
    def refresh(self) -> None:
        """Load the model's current parameters."""
        model, numerics = self.model, self.numerics
        table = model.transformer.wte.weight
        for first in range(0, len(table), 4096):  # in pieces, as an fp32 copy of all is large
            piece = slice(first, first + 4096)
            normalised = rms_norm(table[piece].to(self.stream_dtype), numerics.norm_eps)
            self.embed[piece] = normalised
            if self.smear is not None:
                channels = normalised[:, : numerics.smear_channels]
                gate = F.linear(channels, model.smear_gate.weight.to(self.stream_dtype))
                self.smear[piece] = model.smear_lambda.to(self.stream_dtype) * gate.sigmoid()
        for weights, block in zip(self.layers, model.transformer.h, strict=True):
            assert isinstance(block, Block)
            weights.qkv.fill(self._joined(block.attn))
            weights.out.fill(block.attn.c_proj.weight)
            weights.up.fill(block.mlp.c_fc.weight)
            weights.down.fill(block.mlp.c_proj.weight)
            own = weights.value_embed
            if own is not None:
                theirs = _value_embed(model, block.attn.layer)
                if own.data_ptr() != theirs.data_ptr():  # else it is the model's own table
                    own.copy_(theirs)
        self.head.fill(model.lm_head.weight[: self.config.vocab_size])
        if self.resid is not None and self.first is not None:
            self.resid.copy_(model.resid_lambdas.unsqueeze(-1))
            self.first.copy_(model.x0_lambdas.view(-1, 1, 1))
        if self.backout is not None:
            self.backout.copy_(-model.backout_lambda)

    def _joined(self, attention: Attention) -> Tensor:
        """Return the rows of a layer's `qkv`."""
        q, k, v = attention.c_q.weight, attention.c_k.weight, attention.c_v.weight
        parts = [_paired(q, self.head_dim), _paired(k, self.head_dim), v]
        if attention.layer in value_embed_layers(self.config):
            gate = attention.ve_gate.weight
            below = _even(self.config) - len(gate)
            parts.append(F.pad(gate, (0, q.size(1) - gate.size(1), 0, below)))
        return torch.cat(parts)

    def _table(self, weight: Tensor) -> Tensor:
        return weight.detach() if weight.dtype == self.dtype else weight.detach().to(self.dtype)


def _value_embed(model: GPT, layer: int) -> Tensor:
    table = model.value_embeds[str(layer)]
    assert isinstance(table, Embedding)
    return table.weight


def _even(config: ModelConfig) -> int:
    """Return the number of rows for the gate: one per key/value head, rounded up to even."""
    return config.num_kv_heads + config.num_kv_heads % 2


def _paired(weight: Tensor, dim: int) -> Tensor:
    """Reorder (heads * D, C) so that channel j + D/2 of a head comes right after channel j."""
    return weight.view(-1, 2, dim // 2, weight.size(1)).transpose(1, 2).reshape(weight.shape)
