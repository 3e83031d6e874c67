import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.data.chat_rows import assign_rows, pack_conversations

BOS = 0


def conversations(lengths, seed=0):
    """(ids, mask) of each length; ids after BOS are never BOS, so that rows can be cut again."""
    rng = random.Random(seed)
    return [
        ([BOS, *(rng.randint(1, 999) for _ in range(n - 1))], [0, *rng.choices((0, 1), k=n - 1)])
        for n in lengths
    ]


def cut(rows):
    """The conversations in packed rows, by their BOS; a BOS alone is padding."""
    for tokens, mask in zip(rows.tokens.tolist(), rows.mask.tolist(), strict=True):
        starts = [i for i, token in enumerate(tokens) if token == BOS]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            if end - start > 1:
                yield tokens[start:end], mask[start:end]
            else:
                assert mask[start] == 0


def reference(lengths, row_len):
    """Best fit by looking at everything, as the definition reads."""
    left, rows = dict(enumerate(lengths)), []
    while left:
        row, space = [], row_len
        while fitting := [i for i in left if left[i] <= space]:
            best = min(fitting, key=lambda i: (-left[i], i))
            row.append(best)
            space -= left.pop(best)
        rows.append(row)
    return rows


@settings(deadline=None)
@given(st.lists(st.integers(2, 24), max_size=60))
def test_every_conversation_is_in_the_rows_once_and_whole(lengths):
    rendered = conversations(lengths)
    rows = pack_conversations(rendered, row_len=24)
    assert rows.tokens.shape == rows.mask.shape == (len(rows.tokens), 24)
    assert (rows.tokens.dtype, rows.mask.dtype) == (np.int64, np.uint8)
    assert Counter((tuple(i), tuple(m)) for i, m in cut(rows)) == Counter(
        (tuple(i), tuple(m)) for i, m in rendered
    )


@given(st.lists(st.integers(1, 30), max_size=40))
def test_rows_are_filled_by_best_fit(lengths):
    assert assign_rows(lengths, row_len=30) == reference(lengths, 30)


def test_packing_depends_on_its_arguments_alone():
    rendered = conversations([random.Random(1).randint(2, 50) for _ in range(300)])
    once, again = (pack_conversations(rendered, row_len=64) for _ in range(2))
    assert (once.tokens == again.tokens).all()
    assert (once.mask == again.mask).all()


def test_padding_is_bos_without_loss():
    rows = pack_conversations([([7, 1, 2], [0, 1, 1])], row_len=6)
    assert rows.tokens.tolist() == [[7, 1, 2, 7, 7, 7]]
    assert rows.mask.tolist() == [[0, 1, 1, 0, 0, 0]]


def test_short_conversations_waste_at_most_three_per_cent():
    rng = random.Random(0)
    rendered = conversations([rng.randint(20, 64) for _ in range(1000)])
    rows = pack_conversations(rendered, row_len=257)
    used = sum(len(ids) for ids, _ in rendered)
    assert used / rows.tokens.size > 0.97


def test_no_conversations_make_no_rows():
    rows = pack_conversations([], row_len=8)
    assert rows.tokens.shape == rows.mask.shape == (0, 8)


def test_a_conversation_longer_than_a_row_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError, match="9 tokens do not fit a row of 8"):
        pack_conversations(conversations([9]), row_len=8)
