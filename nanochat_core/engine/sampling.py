"""From logits to the next token, with randomness that belongs to the row.

A row's uniform number is a hash of (seed, sample index, position), not the next draw of a shared
generator: a row's text does not depend on which other rows share its batch, nor on their order.

Shapes: B rows, V vocabulary, K candidates.
"""

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
_UNIFORM_BITS = 23  # so that uniform * total stays below total in fp32


def row_keys(seeds: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """One random stream per row. Seeds and sample indices (B,) int64; keys (B,) int64."""
    return _mix(_mix(seeds + _GOLDEN) + samples * _GOLDEN)


def uniforms(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Each row's number in [0, 1) for the token at `positions`. All (B,); fp32 result."""
    bits = _mix(keys + (positions + 1) * _GOLDEN)
    return _shift(bits, 64 - _UNIFORM_BITS).float() * 2.0**-_UNIFORM_BITS


def sample(
    logits: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None,
) -> torch.Tensor:
    """The next token of every row: (B, V) fp32 logits to (B,) int64 ids.

    Temperature 0 takes the likeliest token (the lowest id of equals). `top_k` of None or 0 and
    below means all tokens; otherwise the k likeliest compete.
    """
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    if temperature < 0.0:
        raise ValueError(f"temperature {temperature} is negative")
    candidates = None
    if top_k is not None and 0 < top_k < logits.shape[-1]:
        logits, candidates = torch.topk(logits, top_k, dim=-1)  # (B, K), (B, K)
    top = logits.amax(dim=-1, keepdim=True)
    cumulative = ((logits - top) / temperature).exp_().cumsum(dim=-1)  # (B, K)
    threshold = uniforms(keys, positions)[:, None] * cumulative[:, -1:]
    choice = torch.searchsorted(cumulative, threshold, right=True)  # (B, 1): skips zero weights
    if candidates is not None:
        choice = candidates.gather(-1, choice)
    return choice[:, 0]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014) on int64, which wraps as uint64 does."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift: torch's own copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
