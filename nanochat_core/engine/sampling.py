"""Samples the next token from logits, with random numbers that depend on the row alone.

A row's uniform number is a hash of (seed, sample index, position), not the next number of a shared
generator: a row's text does not depend on which other rows share its batch, nor on their order.

A token is sampled in this order:

1. temperature 0: the likeliest token of the logits as they are (the lowest id of equals), and
   nothing of what follows;
2. repetition_penalty divides the positive logits of seen tokens and multiplies the others;
3. temperature divides the logits;
4. top_k: the k likeliest compete; None, 0 and below: all;
5. top_p: of these, the fewest likeliest that together have this share of their probability;
6. min_p: those whose probability is below this share of the likeliest one's are out;
7. the row's number picks one in proportion to what is left, which stands in the order of ids, or,
   where there is a top_k or a top_p, of probability.

Shapes: B rows, V vocabulary, K candidates.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.engine.requests import SamplingParams

# SplitMix64's constants, see `_mix`.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
_UNIFORM_BITS = 23  # so that uniform * total stays below total in fp32
_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))

GREEDY = SamplingParams(temperature=0.0)
TINY = 1e-30  # stands for a temperature or a top_p of 0 where it must not divide or exclude all


def row_keys(seeds: Tensor, samples: Tensor) -> Tensor:
    """Return one random stream's key per row. Seeds, sample indices and keys (B,) int64."""
    return _mix(_mix(seeds + _GOLDEN) + samples * _GOLDEN)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return each row's number in [0, 1) for the token at `positions`. All (B,); fp32 result."""
    # The upper bits, which are the best mixed. The product is exact: 23 bits fit fp32's mantissa.
    bits = _mix(keys + (positions + 1) * _GOLDEN)
    return _shift(bits, 64 - _UNIFORM_BITS).float() * 2.0**-_UNIFORM_BITS


def sample(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seen: Tensor | None = None,
) -> Tensor:
    """Sample the next token of every row, with the same parameters for all.

    logits (B, V) fp32; returns (B,) int64 ids. `seen` (B, V) bool: the tokens that the repetition
    penalty applies to. keys, positions (B,) int64.
    """
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    if repetition_penalty != 1.0 and seen is not None:
        logits = _penalised(logits, seen, repetition_penalty)
    candidates = None
    if top_k is not None and 0 < top_k < logits.shape[-1]:
        logits, candidates = torch.topk(logits, top_k, dim=-1)  # (B, K), (B, K)
    # Stable, so that of equal logits the lower id comes first.
    elif top_p < 1.0:
        logits, candidates = torch.sort(logits, dim=-1, descending=True, stable=True)
    logits = _finite(logits)
    top = logits.amax(dim=-1, keepdim=True)
    # (B, K). Not normalised: the likeliest token's weight is 1, which makes min_p a plain bound.
    weights = ((logits - top) / max(temperature, TINY)).exp_()
    if top_p < 1.0:
        weights = torch.where(_leading(weights, max(top_p, TINY)), weights, 0.0)
    if min_p > 0.0:
        weights = torch.where(weights >= min_p, weights, 0.0)
    choice = _choose(weights, uniforms(keys, positions))
    return choice if candidates is None else candidates.gather(-1, choice[:, None])[:, 0]


def sample_each(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    draws: Sequence[SamplingParams],
    seen: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Sample as `sample` does, with `SamplingParams` for each row; equal ones share one call.

    softcap: one that the logits have yet to go through; None: there is none left. It is monotonic,
    so that with a top_k only the k likeliest need it.
    """
    rows_of: dict[SamplingParams, list[int]] = {}
    for row, draw in enumerate(draws):
        # All of temperature 0 are one group: their other settings change nothing.
        rows_of.setdefault(draw if draw.temperature else GREEDY, []).append(row)
    if len(rows_of) == 1:
        return _sample_alike(logits, keys, positions, next(iter(rows_of)), seen, softcap)
    tokens = torch.empty_like(positions)
    for draw, places in rows_of.items():
        rows = torch.tensor(places, device=logits.device)
        marked = None if seen is None else seen[rows]
        tokens[rows] = _sample_alike(
            logits[rows], keys[rows], positions[rows], draw, marked, softcap
        )
    return tokens


def cap(logits: Tensor, softcap: float) -> Tensor:
    """Squash logits to between -softcap and softcap, as the model's last operation does."""
    return (logits / softcap).tanh_().mul_(softcap)


@dataclass(frozen=True, kw_only=True)
class DrawRows:
    """The `SamplingParams` of B rows, as tensors on a device."""

    temperature: Tensor  # (B,) fp32
    top_k: Tensor  # (B,) int64; V where all compete
    top_p: Tensor  # (B,) fp32
    min_p: Tensor  # (B,) fp32
    repetition_penalty: Tensor  # (B,) fp32

    @classmethod
    def of(cls, draws: Sequence[SamplingParams], *, vocab_size: int, device: torch.device) -> Self:
        """Return the rows of `draws`."""

        def floats(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            temperature=floats([d.temperature for d in draws]),
            top_k=torch.tensor([candidates_of(d, vocab_size) for d in draws], device=device),
            top_p=floats([d.top_p for d in draws]),
            min_p=floats([d.min_p for d in draws]),
            repetition_penalty=floats([d.repetition_penalty for d in draws]),
        )


def candidates_of(draw: SamplingParams, vocab_size: int) -> int:
    """Return how many tokens compete after top_k."""
    limited = draw.top_k is not None and 0 < draw.top_k < vocab_size
    return draw.top_k if limited and draw.top_k is not None else vocab_size


def sample_rows(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    draws: DrawRows,
    *,
    num_candidates: int,
    seen: Tensor | None = None,
) -> Tensor:
    """Sample as `sample` does, with every setting a tensor of rows.

    The sequence of operations is the same for all settings and never waits for the device, so a
    CUDA graph can hold it. `num_candidates` is at least the top_k of every row that has one, and V
    if a row has a top_p and no top_k.
    """
    # A graph cannot branch: the token is computed in all three ways (greedy, over the whole
    # vocabulary, over ranked candidates), and each row selects one.
    vocab = logits.size(-1)
    greedy = logits.argmax(dim=-1)
    if seen is not None:
        logits = _penalised(logits, seen, draws.repetition_penalty[:, None])
    logits, numbers = _finite(logits), uniforms(keys, positions)
    temperature = draws.temperature.clamp(min=TINY)[:, None]
    min_p, top_p = draws.min_p[:, None], draws.top_p.clamp(min=TINY)[:, None]
    weights = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).exp_()
    whole = _choose(torch.where(weights >= min_p, weights, 0.0), numbers)
    if num_candidates < vocab:
        values, candidates = torch.topk(logits, num_candidates, dim=-1)
    else:
        values, candidates = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(num_candidates, device=logits.device)
    weights = ((values - values[:, :1]) / temperature).exp_()
    weights = torch.where(ranks < draws.top_k[:, None], weights, 0.0)
    weights = torch.where(_leading(weights, top_p) | (top_p >= 1.0), weights, 0.0)
    weights = torch.where(weights >= min_p, weights, 0.0)
    ranked = candidates.gather(-1, _choose(weights, numbers)[:, None])[:, 0]
    is_ranked = (draws.top_k < vocab) | (draws.top_p < 1.0)
    return torch.where(draws.temperature > 0.0, torch.where(is_ranked, ranked, whole), greedy)


def log_probs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities in nats (B,) of `tokens` (B,), and ids and log-probabilities
    (B, num_top) of the likeliest tokens, all by the logits (B, V) as they are."""
    values = torch.log_softmax(logits, dim=-1)
    chosen = values.gather(-1, tokens[:, None])[:, 0]
    top, ids = torch.topk(values, num_top, dim=-1)
    return chosen, ids, top


def _sample_alike(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    draw: SamplingParams,
    seen: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Sample as `sample` does, from logits that may lack their softcap."""
    # Not needed for temperature 0: the softcap does not change which logit is the largest.
    if softcap is not None and draw.temperature != 0.0:
        count = candidates_of(draw, logits.size(-1))
        # A repetition penalty works on capped logits and may change the order: no short cut.
        if count < logits.size(-1) and draw.repetition_penalty == 1.0:
            values, candidates = torch.topk(logits, count, dim=-1)
            choice = sample(cap(values, softcap), keys, positions, **_settings(draw))
            return candidates.gather(-1, choice[:, None])[:, 0]
        logits = cap(logits, softcap)
    return sample(logits, keys, positions, **_settings(draw), seen=seen)


def _settings(draw: SamplingParams) -> dict[str, Any]:
    return {field: getattr(draw, field) for field in _FIELDS}


def _penalised(logits: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """Make seen tokens less likely (Keskar et al. 2019): divide positive logits by the penalty,
    multiply others."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _leading(weights: Tensor, top_p: float | Tensor) -> Tensor:
    """Return a mask (B, K) of the sorted weights that are needed to reach the share top_p."""
    cumulative = weights.cumsum(dim=-1)
    # Shifted by one: the weight with which the sum crosses the share is still needed.
    return F.pad(cumulative[:, :-1], (1, 0)) < top_p * cumulative[:, -1:]


def _choose(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return the index (B,) in the weights (B, K) at which the numbers (B,) in [0, 1) fall.

    Inverse transform sampling; never returns the index of a weight of 0.
    """
    cumulative = weights.cumsum(dim=-1)
    threshold = numbers[:, None] * cumulative[:, -1:]
    # right=True: a threshold equal to a sum passes over the weights of 0 that end there.
    choice = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return choice.clamp_(max=weights.size(-1) - 1)


def _finite(logits: Tensor) -> Tensor:
    """Replace NaN by the least logit, so that a token is sampled whatever the model gives; if all
    are NaN, any token."""
    return logits.nan_to_num(nan=torch.finfo(logits.dtype).min)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood 2014) to int64, which wraps as uint64."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
