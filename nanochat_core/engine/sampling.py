"""Samples the next token from logits, with random numbers that depend on the row alone.

A row's uniform number is a hash of (seed, sample index, position), not the next number of a shared
generator: a row's text does not depend on which other rows share its batch, nor on their order.

A token is sampled in this order:

1. temperature 0: the likeliest token of the logits as they are (the lowest id of equals), and
   nothing of what follows;
2. temperature divides the logits;
3. top_k: the k likeliest compete; None, 0 and below: all;
4. top_p: of these, the fewest likeliest that together have this share of their probability;
5. the row's number picks one in proportion to what is left, which stands in the order of ids, or,
   where there is a top_k or a top_p, of probability.

Shapes: B rows, V vocabulary, K candidates.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_core.engine.requests import LogProbs, SamplingParams

# SplitMix64's constants, see `_mix`.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
_UNIFORM_BITS = 23
_UNIFORM_STEPS = 1 << _UNIFORM_BITS

GREEDY = SamplingParams(temperature=0.0)
TINY = 1e-30  # stands for a temperature or a top_p of 0 where it must not divide or exclude all


def row_key(seed: int, sample: int) -> int:
    """Return the key of the random stream of a request's sample, a signed 64-bit integer."""
    return _mix_int(_mix_int(seed + _GOLDEN) + sample * _GOLDEN)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return each row's number in [0, 1) for the token at `positions`. All (B,); fp32 result."""
    # The upper bits, which are the best mixed. The product is exact: 23 bits fit fp32's mantissa.
    bits = _mix(keys + (positions + 1) * _GOLDEN)
    return _shift(bits, 64 - _UNIFORM_BITS).float() / _UNIFORM_STEPS


def sample(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    params: SamplingParams,
    softcap: float | None = None,
) -> Tensor:
    """Sample the next token of every row, with the same parameters for all.

    logits (B, V) fp32; returns (B,) int64 ids. keys, positions (B,) int64. softcap: one that the
    logits have yet to go through; None: there is none left.
    """
    if params.temperature == 0.0:  # whatever the softcap: it does not change which is the largest
        return _finite(logits).argmax(dim=-1)
    top_k, top_p = candidates_of(params, logits.size(-1)), params.top_p
    is_ranked = top_k < logits.size(-1)
    # The softcap is monotonic, so only the k likeliest need it.
    if softcap is not None and not is_ranked:
        logits, softcap = cap(logits, softcap), None
    candidates = None
    if is_ranked:
        # Of numbers alone: to topk NaN is the largest.
        candidates = torch.topk(_finite(logits), top_k, dim=-1).indices  # (B, K)
        logits = logits.gather(-1, candidates)
    # Stable, so that of equal logits the lower id comes first.
    elif top_p < 1.0:
        logits, candidates = torch.sort(logits, dim=-1, descending=True, stable=True)
    if softcap is not None:
        logits = cap(logits, softcap)
    logits = _finite(logits)
    top = logits.amax(dim=-1, keepdim=True)
    # (B, K). Not normalised: the likeliest token's weight is 1.
    weights = ((logits - top) / max(params.temperature, TINY)).exp_()
    if top_p < 1.0:
        weights = torch.where(_leading(weights, max(top_p, TINY)), weights, 0.0)
    choice = _choose(weights, uniforms(keys, positions))
    return choice if candidates is None else candidates.gather(-1, choice[:, None])[:, 0]


def sample_each(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    all_params: Sequence[SamplingParams],
    softcap: float | None = None,
) -> Tensor:
    """Sample as `sample` does, with `SamplingParams` for each row; equal ones share one call."""
    rows_of: dict[SamplingParams, list[int]] = {}
    for row, params in enumerate(all_params):
        # All of temperature 0 are one group: their other settings change nothing.
        rows_of.setdefault(params if params.temperature else GREEDY, []).append(row)
    if len(rows_of) == 1:
        return sample(logits, keys, positions, next(iter(rows_of)), softcap)
    tokens = torch.empty_like(positions)
    for params, numbers in rows_of.items():
        at = torch.tensor(numbers, device=logits.device)
        tokens[at] = sample(logits[at], keys[at], positions[at], params, softcap)
    return tokens


def cap(logits: Tensor, softcap: float) -> Tensor:
    """Squash logits to between -softcap and softcap, as the model's last operation does."""
    return (logits / softcap).tanh_().mul_(softcap)


class SamplingRows(NamedTuple):
    """The `SamplingParams` of B rows, as tensors on a device."""

    temperature: Tensor  # (B,) fp32
    top_k: Tensor  # (B,) int64; V where all compete
    top_p: Tensor  # (B,) fp32

    @classmethod
    def of(
        cls, all_params: Sequence[SamplingParams], *, vocab_size: int, device: torch.device
    ) -> Self:
        """Return a row for each of `all_params`."""
        columns = zip(*(row_of(params, vocab_size) for params in all_params), strict=True)
        return cls(*(torch.tensor(column, device=device) for column in columns))

    def take(self, rows: Tensor) -> "SamplingRows":
        """Return `rows` (B,) of these."""
        return SamplingRows(*(column[rows] for column in self))


def row_of(params: SamplingParams, vocab_size: int) -> tuple[float, int, float]:
    """Return the values of a row of `SamplingRows`."""
    return float(params.temperature), candidates_of(params, vocab_size), float(params.top_p)


def candidates_of(params: SamplingParams, vocab_size: int) -> int:
    """Return how many tokens compete after top_k."""
    top_k = params.top_k or 0
    return top_k if 0 < top_k < vocab_size else vocab_size


def sample_rows(
    logits: Tensor,
    keys: Tensor,
    positions: Tensor,
    params: SamplingRows,
    *,
    num_candidates: int,
) -> Tensor:
    """Sample as `sample` does, with every setting a tensor of rows.

    The sequence of operations is the same for all settings and never waits for the device, so a
    CUDA graph can hold it. `num_candidates` is at least the top_k of every row that has one, and V
    if a row has a top_p and no top_k.
    """
    # A graph cannot branch: the token is computed in all three ways (greedy, over the whole
    # vocabulary, over ranked candidates), and each row selects one.
    vocab = logits.size(-1)
    greedy = _finite(logits).argmax(dim=-1)
    logits, numbers = _finite(logits), uniforms(keys, positions)
    temperature = params.temperature.clamp(min=TINY)[:, None]
    top_p = params.top_p.clamp(min=TINY)[:, None]
    weights = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).exp_()
    whole = _choose(weights, numbers)
    if num_candidates < vocab:
        values, candidates = torch.topk(logits, num_candidates, dim=-1)
    else:
        values, candidates = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(num_candidates, device=logits.device)
    weights = ((values - values[:, :1]) / temperature).exp_()
    weights = torch.where(ranks < params.top_k[:, None], weights, 0.0)
    weights = torch.where(_leading(weights, top_p) | (top_p >= 1.0), weights, 0.0)
    ranked = candidates.gather(-1, _choose(weights, numbers)[:, None])[:, 0]
    is_ranked = (params.top_k < vocab) | (params.top_p < 1.0)
    return torch.where(params.temperature > 0.0, torch.where(is_ranked, ranked, whole), greedy)


def log_probs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities in nats (B,) of `tokens` (B,), and ids and log-probabilities
    (B, num_top) of the likeliest tokens, all by the logits (B, V) as they are."""
    values = torch.log_softmax(logits, dim=-1)
    chosen = values.gather(-1, tokens[:, None])[:, 0]
    top, ids = torch.topk(values, num_top, dim=-1)
    return chosen, ids, top


def read_log_probs(
    found: tuple[Tensor, Tensor, Tensor], wants: Sequence[int | None]
) -> list[LogProbs | None]:
    """Return the result of `log_probs` on the host, each row with as many alternatives as it wants;
    None for a row that wants no log-probabilities."""
    rows = zip(*(tensor.tolist() for tensor in found), wants, strict=False)
    return [
        None if count is None else LogProbs(chosen, tuple(zip(ids, top, strict=True))[:count])
        for chosen, ids, top, count in rows
    ]


class SlotSampler:
    """The sampling parameters of a runner's slots, and sampling with them."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Set defaults for all slots."""
        self.params = [SamplingParams()] * num_slots
        self.keys = [0] * num_slots
        self.num_log_probs: list[int | None] = [None] * num_slots
        self._device = device

    def start(
        self, slot: int, params: SamplingParams, *, key: int, num_log_probs: int | None
    ) -> None:
        """Set a slot's parameters, see `Runner.start`. key: see `row_key`."""
        self.params[slot], self.keys[slot] = params, key
        self.num_log_probs[slot] = num_log_probs

    def sample(
        self,
        slots: Sequence[int],
        logits: Tensor,
        positions: Sequence[int],
        softcap: float | None = None,
    ) -> list[int]:
        """Sample a token for each slot from its row of logits (n, V); softcap: see `sample`."""
        all_params = [self.params[slot] for slot in slots]
        keys = self._tensor([self.keys[slot] for slot in slots])
        return sample_each(logits, keys, self._tensor(positions), all_params, softcap).tolist()

    def log_probs(
        self,
        slots: Sequence[int],
        logits: Tensor,
        tokens: Sequence[int],
        softcap: float | None = None,
    ) -> list[LogProbs | None]:
        """Return the log-probabilities of the slots that want them; an empty list if none does."""
        wants = [self.num_log_probs[slot] for slot in slots]
        rows = [i for i, count in enumerate(wants) if count is not None]
        if not rows:
            return []
        # One call with the most alternatives that a row wants; each row then takes its share.
        most = max(count for count in wants if count is not None)
        logits = logits[self._tensor(rows)]
        logits = logits if softcap is None else cap(logits, softcap)
        values = log_probs(logits, self._tensor([tokens[i] for i in rows]), most)
        found: list[LogProbs | None] = [None] * len(wants)
        for i, one in zip(rows, read_log_probs(values, [wants[i] for i in rows]), strict=True):
            found[i] = one
        return found

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _leading(weights: Tensor, top_p: float | Tensor) -> Tensor:
    """Return a mask (B, K) of the sorted weights that are needed to reach the share top_p."""
    cumulative = _cumulative(weights)
    # Shifted by one: the weight with which the sum crosses the share is still needed.
    return F.pad(cumulative[:, :-1], (1, 0)).float() < top_p * cumulative[:, -1:].float()


def _choose(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return the index (B,) in the weights (B, K) at which the numbers (B,) in [0, 1) fall.

    Inverse transform sampling; never returns the index of a weight of 0.
    """
    cumulative = _cumulative(weights)
    number, total = (numbers[:, None] * _UNIFORM_STEPS).long(), cumulative[:, -1:]
    # number x total / 2^23, exactly: the product alone would not fit 64 bits.
    high, low = total >> _UNIFORM_BITS, total & (_UNIFORM_STEPS - 1)
    threshold = high * number + (low * number >> _UNIFORM_BITS)
    # right=True: a threshold equal to a sum passes over the weights of 0 that end there.
    choice = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return choice.clamp_(max=weights.size(-1) - 1)


def _cumulative(weights: Tensor) -> Tensor:
    """Return the sums of the weights (B, K), at most 1 each, up to each one, in units of 2^-31.

    int64: exact in whatever order a device adds, as deterministic algorithms require.
    """
    return (weights * 2.0**31).long().cumsum(dim=-1)


def _finite(logits: Tensor) -> Tensor:
    """Replace NaN by the least logit and infinities by finite ones, so that a token is sampled
    whatever the model gives; if all are NaN, any token."""
    return logits.nan_to_num(nan=torch.finfo(logits.dtype).min)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood 2014) to int64, which wraps as uint64."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _mix_int(x: int) -> int:
    """Apply `_mix` to one number: torch takes some fifty times as long for it."""
    x %= 1 << 64
    x = (x ^ x >> 30) * _MIX1 % (1 << 64)
    x = (x ^ x >> 27) * _MIX2 % (1 << 64)
    x ^= x >> 31
    return x - (x >> 63 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right logically: torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
