"""Sampling parameters of the native runner's slots, and sampling in the kernels or sampling.py."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nanochat_core.engine.requests import LogProbs, SamplingParams
from nanochat_core.engine.sampling import TINY, log_probs, sample_each

_RULE = np.dtype([("temperature", np.float32), ("top_k", np.int32), ("key", np.int64)])


class Draws:
    """The sampling parameters of all slots. `rules` (num_slots,) is kernels_draw.h's DrawRule."""

    def __init__(self, library: ctypes.CDLL, *, num_slots: int, vocab_size: int) -> None:
        self.rules = np.zeros(num_slots, _RULE)
        self.is_special = [False] * num_slots  # needs more than a temperature and a top_k
        self.num_log_probs: list[int | None] = [None] * num_slots
        self._draws: list[SamplingParams] = [SamplingParams()] * num_slots
        self._library = library
        self._shape = (num_slots, vocab_size)
        self._seen: Tensor | None = None  # (num_slots, V) bool; made for the first penalty

    def start(
        self, slot: int, *, draw: SamplingParams, seed: int, sample: int, num_log_probs: int | None
    ) -> None:
        """Set a slot's parameters, see `Runner.start`."""
        key = self._library.nf_row_key(seed, sample)
        top_k = min(max(draw.top_k or 0, 0), self._shape[1])
        # At least TINY: a smaller number is 0 in fp32, and 0 means the likeliest token.
        temperature = max(draw.temperature, TINY) if draw.temperature else 0.0
        self.rules[slot] = (temperature, top_k, key)
        self._draws[slot], self.num_log_probs[slot] = draw, num_log_probs
        penalised = draw.repetition_penalty != 1.0
        bent = draw.top_p < 1.0 or draw.min_p > 0.0 or penalised
        self.is_special[slot] = bent and draw.temperature != 0.0
        if penalised:
            if self._seen is None:
                self._seen = torch.zeros(self._shape, dtype=torch.bool)
            self._seen[slot] = False

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Count tokens as seen, see `Runner.remember`."""
        if self._seen is not None and self._draws[slot].repetition_penalty != 1.0:
            self._seen[slot, torch.tensor(tokens, dtype=torch.int64)] = True  # there may be none

    def wants_torch(self, slots: Sequence[int]) -> bool:
        """Return whether one of the slots needs what the kernels do not compute."""
        return any(self.is_special[s] or self.num_log_probs[s] is not None for s in slots)

    def draw(
        self,
        engine: int,
        slots: Sequence[int],
        logits: Tensor,
        positions: Sequence[int],
    ) -> tuple[list[int], list[LogProbs | None]]:
        """Sample a token for each slot from its row of capped logits (n, V), for its position.

        Returns the tokens and their log-probabilities, an empty list if no slot wants any.
        """
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        which, where = np.array(slots, np.int32), np.array(positions, np.int32)
        out = np.empty(len(slots), np.int32)
        self._library.nf_draw(
            engine,
            len(slots),
            which.ctypes.data,
            where.ctypes.data,
            logits.data_ptr(),
            logits.stride(0),
            out.ctypes.data,
        )
        # The kernels sampled these rows too, without their other settings: replace the tokens.
        rows = [i for i, slot in enumerate(slots) if self.is_special[slot]]
        if rows:
            out[rows] = self._draw_special([slots[i] for i in rows], logits[rows], where[rows])
        tokens: list[int] = out.tolist()
        return tokens, self._log_probs(slots, logits, tokens)

    def _draw_special(self, slots: list[int], logits: Tensor, positions: np.ndarray) -> np.ndarray:
        draws = [self._draws[slot] for slot in slots]
        seen = None
        if self._seen is not None and any(d.repetition_penalty != 1.0 for d in draws):
            seen = self._seen[slots]
        keys = torch.from_numpy(self.rules["key"][slots])
        drawn = sample_each(logits, keys, torch.from_numpy(positions).long(), draws, seen)
        if self._seen is not None and seen is not None:
            self._seen[slots, drawn] = True
        return drawn.numpy()

    def _log_probs(
        self, slots: Sequence[int], logits: Tensor, tokens: list[int]
    ) -> list[LogProbs | None]:
        wants = [self.num_log_probs[slot] for slot in slots]
        rows = [i for i, number in enumerate(wants) if number is not None]
        if not rows:
            return []
        most = max(number for number in wants if number is not None)
        chosen, ids, values = log_probs(logits[rows], torch.tensor(tokens)[rows], most)
        found: list[LogProbs | None] = [None] * len(slots)
        for row, *of in zip(rows, chosen.tolist(), ids.tolist(), values.tolist(), strict=True):
            top = tuple(zip(of[1], of[2], strict=True))[: wants[row]]
            found[row] = LogProbs(chosen=of[0], top=top)
        return found
