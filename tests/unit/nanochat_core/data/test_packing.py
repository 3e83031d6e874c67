import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.data.packing import Segment, batches, pack
from nanochat_core.errors import ConfigError
from tests.support.nanochat_core.data.fixtures import refused

LENGTHS = st.lists(st.integers(1, 60), max_size=300)


def split(lengths, size):
    return [lengths[i : i + size] for i in range(0, len(lengths), size)]


def nanochat_rows(arriving, *, row_len, buffer_documents):
    """The rule written out on arrays in order of arrival: rows of (document, tokens taken)."""
    batches_left = [np.array(batch) for batch in reversed(arriving)]
    waiting, documents = np.empty(0, np.int64), np.empty(0, np.int64)
    arrived, num_waiting, rows = 0, 0, []
    while True:
        row, space = [], row_len
        while space > 0:
            while num_waiting < buffer_documents and batches_left:
                batch = batches_left.pop()
                left = np.flatnonzero(waiting)
                waiting = np.concatenate([waiting[left], batch])
                documents = np.concatenate([documents[left], arrived + np.arange(len(batch))])
                arrived += len(batch)
                num_waiting = len(waiting)
            if not num_waiting:
                return rows
            fitting = np.where(waiting <= space, waiting, 0)
            if not fitting[chosen := int(fitting.argmax())]:
                chosen = int(np.where(waiting, waiting, waiting.max() + 1).argmin())
            taken = min(int(waiting[chosen]), space)
            row.append((int(documents[chosen]), taken))
            waiting[chosen] = 0  # it waits no longer
            num_waiting -= 1
            space -= taken
        rows.append(row)


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 50), st.integers(1, 40), st.integers(1, 130))
def test_the_nanochat_policy_is_the_rule_written_out(lengths, row_len, buffer_documents, batch):
    arriving = split(lengths, batch)
    rows = pack(arriving, row_len=row_len, policy="nanochat", buffer_documents=buffer_documents)
    found = [[(s.document, s.length) for s in row] for row in rows]
    assert found == nanochat_rows(arriving, row_len=row_len, buffer_documents=buffer_documents)


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 50), st.integers(1, 40), st.sampled_from(["default", "nanochat"]))
def test_every_row_is_full_and_begins_with_a_bos(lengths, row_len, buffer_documents, policy):
    rows = pack(
        split(lengths, 10), row_len=row_len, policy=policy, buffer_documents=buffer_documents
    )
    for row in rows:
        assert sum(segment.size for segment in row) == row_len
        assert all(segment.length >= 0 and segment.size > 0 for segment in row)


@settings(deadline=None, max_examples=300)
@given(LENGTHS, st.integers(2, 50), st.integers(1, 40), st.integers(1, 130))
def test_every_document_is_trained_on_from_its_first_token_to_where_it_is_cropped(
    lengths, row_len, buffer_documents, batch
):
    """What docs/guides/data.md promises of the default policy, word by word."""
    arriving = split(lengths, batch)
    rows = list(
        pack(arriving, row_len=row_len, policy="default", buffer_documents=buffer_documents)
    )
    by_document = [[] for _ in lengths]
    for row in rows:
        for segment in row:
            by_document[segment.document].append((segment.start, segment.length, row))
    waiting = 0  # tokens of what had not been placed when the text ended
    for length, found in zip(lengths, by_document, strict=True):
        its = sorted(found)
        placed = 0
        for start, tokens, _ in its:
            assert start == placed  # from the first token on, without a gap and nothing twice
            placed += tokens
        assert placed <= length
        if placed == length:
            continue
        if not its or len(its[-1][2]) == 1:  # none of it, or only the rows it filled alone
            waiting += length - placed
        else:  # cropped: it ends its row, and what it lost is of the rest that filled no row alone
            assert by_document[its[-1][2][-1].document] is found
            rest = (length - row_len) % (row_len - 1) or row_len - 1  # of one that filled rows
            assert length <= row_len or length - placed <= rest
            assert 0 < length - placed < row_len
    assert waiting < row_len


PACKED = {  # lengths as they arrive, the buffer -> rows of ten tokens
    "a long document fills rows at once, behind a bos of its own, and its rest waits": (
        ([[25, 3], [4]], 1),
        [[Segment(0, 0, 10)], [Segment(0, 10, 9)], [Segment(0, 19, 6), Segment(1, 0, 3)]],
    ),
    "one that fills rows exactly leaves no rest": (
        ([[19, 9]], 1),
        [[Segment(0, 0, 10)], [Segment(0, 10, 9)]],
    ),
    "the largest that fits comes next, of equals the earliest": (
        ([[4, 6, 4, 6]], 4),
        [[Segment(1, 0, 6), Segment(0, 0, 4)], [Segment(3, 0, 6), Segment(2, 0, 4)]],
    ),
    "where none fits the shortest is cropped": (
        ([[7, 8, 9]], 3),
        [[Segment(2, 0, 9), Segment(0, 0, 1)]],
    ),
}


@pytest.mark.parametrize(("given", "rows"), PACKED.values(), ids=PACKED)
def test_the_default_policy_packs_as_its_guide_says(given, rows):
    arriving, buffer = given
    assert list(pack(arriving, row_len=10, policy="default", buffer_documents=buffer)) == rows


def test_batches_do_not_cross_row_groups():
    assert list(batches([300, 128, 1])) == [128, 128, 44, 128, 1]


def test_an_unknown_policy_is_refused():
    rows = pack([[1]], row_len=10, policy="best", buffer_documents=1)
    refused(r"rows\.policy is 'best'", next, rows, kind=ConfigError)
