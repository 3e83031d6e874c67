"""The data of a device runner's steps: the slots' state, and a step's kind and output.

Shapes: B rows of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat_core.engine.runner import DecodeOutput
from nanochat_core.engine.sampling import GREEDY, SamplingRows, read_log_probs


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The features that a step needs; steps of one kind are the same sequence of operations."""

    num_rows: int
    num_pages: int  # the longest row's; 0 if attention does not need it
    all_candidates: bool  # samples from more than MAX_CANDIDATES
    wants_log_probs: bool


class StepOutput(NamedTuple):
    """A step's output; log-probabilities are empty if not wanted."""

    tokens: Tensor  # (B,), -1 of stopped rows
    chosen: Tensor  # (B,)
    ids: Tensor  # (B, MAX_LOG_PROBS)
    values: Tensor  # (B, MAX_LOG_PROBS)


class State:
    """Tensors of the slots and, at the end, of one that is always stopped, for rows to spare."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        count = num_slots + 1
        integers = torch.zeros((5, count), dtype=torch.int64, device=device)
        self.length, self.prev_token, self.token, self.limit, self.key = integers
        self.stopped = torch.ones(count, dtype=torch.bool, device=device)
        self.params = SamplingRows.of([GREEDY] * count, vocab_size=vocab_size, device=device)


def read_output(steps: Sequence[StepOutput], wants: Sequence[int | None]) -> DecodeOutput:
    """Return the output of steps that are done. wants: alternatives that each row gets; None: no
    log-probabilities."""
    count = len(wants)  # rows beyond it are spare ones of a graph
    tokens = [step.tokens[:count].tolist() for step in steps]
    if all(number is None for number in wants):
        return DecodeOutput(tokens=tokens, log_probs=[])
    log_probs = [
        read_log_probs(
            (step.chosen, step.ids, step.values),
            [n if token >= 0 else None for n, token in zip(wants, column, strict=True)],
        )
        for step, column in zip(steps, tokens, strict=True)
    ]
    return DecodeOutput(tokens=tokens, log_probs=log_probs)
