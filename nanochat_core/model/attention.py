"""Causal attention inside a sliding window: the one place where a backend is chosen.

A window of W lets the query at position t see the keys t-W..t: W to its left and itself, W+1 keys.
Backends that count keys rather than distance need W+1.

Shapes: B rows, T new tokens, S cached tokens, H query heads, K key/value heads, D head dim.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """Attention of whole rows over themselves: q (B, T, H, D), k, v (B, T, K, D) -> like q."""
    length = q.size(1)
    mask = None if window >= length - 1 else window_mask(length, window, q.device)
    return _attend(q, k.transpose(1, 2), v.transpose(1, 2), mask)


def attend_cached(q: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor) -> Tensor:
    """Attention over a cache: q (B, T, H, D), keys, values (B, K, S, D), mask (B, T, S)."""
    return _attend(q, keys, values, mask.unsqueeze(1))


def cached_mask(positions: Tensor, length: int, window: int) -> Tensor:
    """Which of `length` cached keys each query sees: positions (B, T) int64 -> (B, T, S) bool."""
    distance = positions.unsqueeze(-1) - torch.arange(length, device=positions.device)
    return (distance >= 0) & (distance <= window)


@lru_cache(maxsize=16)
def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Which keys each query of a row sees: (T, T) bool."""
    # A tensor made in inference mode could not serve a later training step from the cache.
    with torch.inference_mode(False):
        positions = torch.arange(length, device=device).unsqueeze(0)
        return cached_mask(positions, length, window)[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q (B, T, H, D), k, v (B, K, S, D); no mask means causal, and S = T."""
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.size(2) != k.size(1),
    )
    return mixed.transpose(1, 2)
