"""Packs rendered conversations into rows of one length, for midtraining and SFT.

No conversation is cropped, so a row ends in padding: <|bos|> with mask 0. Best fit (the longest
conversation that still fits goes next, equal lengths in the order given) keeps it small. Measured
on ten thousand conversations: of 20 to 70 tokens in rows of 257, 2 % of all tokens; the same in
rows of 2049, 0.7 %; of 100 to 1000 tokens in rows of 2049, 0.4 %.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ChatRows:
    """Packed rows. Targets are tokens[:, 1:] where mask[:, 1:] is 1."""

    tokens: npt.NDArray[np.int64]  # (N, row_len)
    mask: npt.NDArray[np.uint8]  # (N, row_len), 1 where the token is learnt


def pack_conversations(
    rendered: Sequence[tuple[list[int], list[int]]], *, row_len: int
) -> ChatRows:
    """Rows of `row_len` tokens that hold every (ids, mask) once, whole, each starting with <|bos|>.

    The result depends on the arguments alone. Each conversation must begin with <|bos|>, which also
    pads, and be at most `row_len` long (render it with max_tokens=row_len).
    """
    rows = assign_rows([len(ids) for ids, _ in rendered], row_len=row_len)
    bos = rendered[0][0][0] if rendered else 0
    tokens = np.full((len(rows), row_len), bos, dtype=np.int64)
    mask = np.zeros((len(rows), row_len), dtype=np.uint8)
    for row, members in enumerate(rows):
        start = 0
        for member in members:
            ids, learnt = rendered[member]
            assert ids[0] == bos, "a conversation that begins with another token than the first one"
            assert len(ids) == len(learnt), f"{len(ids)} tokens with a mask of {len(learnt)}"
            tokens[row, start : start + len(ids)] = ids
            mask[row, start : start + len(ids)] = learnt
            start += len(ids)
    return ChatRows(tokens, mask)


def assign_rows(lengths: Sequence[int], *, row_len: int) -> list[list[int]]:
    """For each row, the indices of what it holds. Fast where lengths repeat."""
    waiting: dict[int, deque[int]] = {}  # length -> indices, in the order given
    for index, length in enumerate(lengths):
        assert 0 < length <= row_len, f"{length} tokens do not fit a row of {row_len}"
        waiting.setdefault(length, deque()).append(index)
    kinds = sorted(waiting)
    rows: list[list[int]] = []
    while kinds:
        members: list[int] = []
        space = row_len
        while position := bisect_right(kinds, space):
            length = kinds[position - 1]
            members.append(waiting[length].popleft())
            space -= length
            if not waiting[length]:
                kinds.pop(position - 1)
        rows.append(members)
    return rows
