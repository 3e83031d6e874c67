"""The model's forward pass over a flat list of tokens, shared by prefill and decode.

The list mixes tokens of different sequences; only attention knows which belong together, so the
caller provides it. The arithmetic is that of model/gpt.py on the weights of weights.py.

Shapes: N tokens, R of them whose logits are wanted, C width, H query heads, K key/value heads, D
head dim, V vocabulary.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.engine.runners.weights import LayerWeights, Weights

# (layer, q (N, H, D), k and v (N, K, D)) -> (N, H, D), or (R, H, D) in the last layer. It stores k
# and v in the KV cache. q and k are not scaled: the softmax's scale is `Weights.softmax_scale`.
AttentionFn: TypeAlias = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def forward(
    weights: Weights,
    tokens: Tensor,
    prev_tokens: Tensor,
    positions: Tensor,
    attention_fn: AttentionFn,
    wanted: Tensor | None = None,
) -> Tensor:
    """Return logits (R, V) fp32, before the softcap, of the tokens at indices `wanted` (R,); None:
    of all.

    tokens, prev_tokens (each token's predecessor; -1: there is none) and positions (N,) int64.
    """
    eps, last = weights.numerics.norm_eps, weights.config.depth - 1
    x = _embed(weights, tokens, prev_tokens)
    rotary = weights.rotary[positions]
    first = None if weights.first is None else weights.first * x  # (depth, N, C) fp32
    middle = x
    for layer, block in enumerate(weights.layers):
        if first is not None and weights.resid is not None:
            x = torch.addcmul(first[layer], x, weights.resid[layer]).to(x.dtype)
        q, k, v = _queries(weights, block, _norm(x, eps), tokens, rotary)
        mixed = attention_fn(layer, q, k, v)
        # Only the last layer can be cut down to the wanted tokens: until there every token's keys
        # and values depend on its activations.
        if layer == last and wanted is not None:
            if not len(wanted):  # a chunk inside a prompt: its keys and values are stored by now
                return x.new_empty((0, weights.config.vocab_size), dtype=torch.float32)
            x, middle = x[wanted], middle[wanted]
        x = x + block.out(mixed.flatten(1))
        x = x + block.down(F.relu(block.up(_norm(x, eps))).square_())
        if layer == weights.config.depth // 2:
            middle = x
    if weights.backout is not None:
        x = torch.addcmul(x, middle, weights.backout)
    return weights.head(_norm(x, eps)).float()


def _embed(weights: Weights, tokens: Tensor, prev_tokens: Tensor) -> Tensor:
    x = F.embedding(tokens, weights.embed).to(weights.stream_dtype)
    if weights.smear is None:
        return x
    # Smear: a share of the previous token's embedding is added; the first token has none.
    gate = F.embedding(tokens, weights.smear) * (prev_tokens >= 0).unsqueeze(-1)
    prev_token = F.embedding(prev_tokens.clamp(min=0), weights.embed).to(x.dtype)
    return torch.addcmul(x, gate, prev_token)


def _queries(
    weights: Weights, block: LayerWeights, h: Tensor, tokens: Tensor, rotary: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (N, H, D), k and v (N, K, D) of the normalised h (N, C)."""
    heads, kv_heads, dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
    joined = block.qkv(h)
    split, end = (heads + kv_heads) * dim, (heads + 2 * kv_heads) * dim
    v = joined[:, split:end].view(-1, kv_heads, dim)
    if block.value_embed is not None:
        gate = joined[:, end : end + kv_heads].sigmoid().unsqueeze(-1)  # (N, K, 1)
        embed = F.embedding(tokens, block.value_embed).to(h.dtype).view_as(v)
        v = torch.addcmul(v, gate, embed, value=weights.numerics.gate_scale)
    qk = joined[:, :split].reshape(-1, heads + kv_heads, dim).float()
    rotated = torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * rotary
    # Normalised after the rotation, as in model/gpt.py: a bf16 cos and sin change lengths.
    qk = _norm(torch.view_as_real(rotated).flatten(-2), weights.numerics.norm_eps).to(h.dtype)
    return qk[:, :heads], qk[:, heads:], v


def _norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), eps=eps)
