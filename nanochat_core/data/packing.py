"""Pack documents into rows: best-fit with cropping; every row begins with bos.

Rows have no padding. A row takes the largest waiting document that fits, repeatedly; when none
fits, the shortest is cropped to fill the row and the rest of it is dropped. Two policies:

nanochat    exactly nanochat's rows at one rank. Documents longer than a row wait until one is
            cropped, for which the shortest is chosen: they fill the buffer, and the longest are
            never trained on.
default     a document longer than a row is split on arrival into rows of its own and a rest that
            waits like any document. Each piece after the first gets its own bos. So documents of
            any length are trained on, and the buffer holds only documents that fit.

Pure functions of lengths: no tokens are read here.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from nanochat_core.errors import ConfigError

POLICIES = ("default", "nanochat")
_DOCUMENT_BITS = 40  # of a waiting entry, see _Buffer
_DOCUMENT_MASK = (1 << _DOCUMENT_BITS) - 1
BATCH_DOCUMENTS = 128  # arrive together; a batch does not cross row groups


class Segment(NamedTuple):
    """Tokens `start` to `start + length` of a document, preceded by a bos if `start` > 0."""

    document: int
    start: int
    length: int

    @property
    def size(self) -> int:
        """The number of places it takes in a row."""
        return self.length + (self.start > 0)


Row: TypeAlias = list[Segment]


def batches(row_groups: Iterable[int]) -> Iterator[int]:
    """Yield the sizes of the batches in which documents arrive, given those of the row groups."""
    for documents in row_groups:
        for start in range(0, documents, BATCH_DOCUMENTS):
            yield min(BATCH_DOCUMENTS, documents - start)


def pack(
    lengths: Iterable[Sequence[int]], *, row_len: int, policy: str, buffer_documents: int
) -> Iterator[Row]:
    """Yield rows of exactly `row_len` places each, in the order in which they are filled.

    `lengths` are the documents' tokens (bos included), a sequence per batch. Another batch is taken
    whenever fewer than `buffer_documents` wait. Documents are numbered by arrival. An incomplete
    last row is dropped.
    """
    if policy not in POLICIES:
        raise ConfigError(f"rows.policy is '{policy}'", hint=f"one of: {', '.join(POLICIES)}")
    assert row_len > 1
    buffer = _Buffer(lengths, row_len=row_len, cuts=policy == "default")
    while True:
        row: Row = []
        space = row_len
        while space:
            # Before every segment, as in nanochat: the choice depends on what is in the buffer.
            yield from buffer.refill(buffer_documents)
            segment = buffer.take(space)
            if segment is None:
                return
            row.append(segment)
            space -= segment.size
        yield row


class _Buffer:
    """The waiting pieces of documents, sorted by size, then by arrival."""

    def __init__(self, lengths: Iterable[Sequence[int]], *, row_len: int, cuts: bool) -> None:
        self._batches = iter(lengths)
        self._row_len = row_len
        self._cuts = cuts  # whether documents longer than a row are cut on arrival
        self._arrived = 0
        # Sorted integers, size * 2^40 + document: half the time of sorting tuples.
        self._waiting: list[int] = []
        self._starts: dict[int, int] = {}  # of the waiting rests, by document

    def refill(self, documents: int) -> list[Row]:
        """Take batches until `documents` wait; return the rows that one document fills alone."""
        rows: list[Row] = []
        while len(self._waiting) < documents:
            batch = next(self._batches, None)
            if batch is None:
                break
            for length in batch:
                if length > self._row_len and self._cuts:
                    start = self._cut(length, rows)
                    self._starts[self._arrived] = start
                    length += 1 - start  # the rest and its bos
                insort(self._waiting, length << _DOCUMENT_BITS | self._arrived)
                self._arrived += 1
        return rows

    def take(self, space: int) -> Segment | None:
        """Remove the largest that fits, else crop the shortest to `space`; None if none waits."""
        waiting = self._waiting
        if not waiting:
            return None
        place = bisect_left(waiting, (space + 1) << _DOCUMENT_BITS)
        # Among documents of the largest size that fits, the earliest. A place of 0 means none fits,
        # and is the shortest and earliest document.
        if place:
            largest = waiting[place - 1] >> _DOCUMENT_BITS
            place = bisect_left(waiting, largest << _DOCUMENT_BITS)
        entry = waiting.pop(place)
        size, document = entry >> _DOCUMENT_BITS, entry & _DOCUMENT_MASK
        # Not 0 for the rest of a split document, whose size includes a bos of its own.
        start = self._starts.pop(document, 0)
        return Segment(document, start, min(size, space) - (start > 0))

    def _cut(self, length: int, rows: list[Row]) -> int:
        """Add the rows that the arriving document fills alone; return where its rest starts."""
        start = 0
        # The rest, with its bos, is at least one token and fits a row.
        while length - start + (start > 0) > self._row_len:
            segment = Segment(self._arrived, start, self._row_len - (start > 0))
            rows.append([segment])
            start += segment.length
        return start
