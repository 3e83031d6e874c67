"""Packs rendered conversations into rows of one length, for midtraining and SFT.

No conversation is cropped, so a row ends in padding: <|bos|> with mask 0. Best fit (the longest
conversation that still fits goes next, equal lengths in the order given) keeps it small. Measured
on ten thousand conversations: of 20 to 70 tokens in rows of 257, 2 % of all tokens; the same in
rows of 2049, 0.7 %; of 100 to 1000 tokens in rows of 2049, 0.4 %.

A mixture may be half a billion tokens. It is rendered piece by piece into files, in processes, and
the rows are written once for all ranks of a node, which map them: in memory are a few numbers for
each conversation.
"""

import shutil
import tempfile
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from nanochat_core.data.array_files import check_size, new_array, write_array
from nanochat_core.data.processes import map_in_processes, usable_cores
from nanochat_core.data.token_files import dtype_for
from nanochat_core.errors import DataError
from nanochat_core.job import sync_directory
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from tasks.base import Conversation

_TOKENS, _BITS = "tokens.npy", "mask_bits.npy"
_PIECE = 1024  # conversations rendered at a time, and rows written at a time
_FEW = 16 * _PIECE  # conversations that are rendered before other processes would have started
_POLL_SECONDS = 0.1
_TELL_SECONDS = 5.0  # between two lines on how far it is

Rendered: TypeAlias = tuple[Sequence[int], Sequence[int]]  # ids and mask of a conversation


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some rendered conversations, one after the other."""

    ids: npt.NDArray[Any]  # (n,) u16 or u32
    mask: npt.NDArray[np.uint8]  # (n,), 1 where the token is learnt
    lengths: npt.NDArray[np.uint32]  # tokens of each conversation


@dataclass(frozen=True, kw_only=True)
class ChatRows:
    """Packed rows. Targets are tokens[:, 1:] where the mask, [:, 1:] too, is 1."""

    tokens: npt.NDArray[Any]  # (N, row_len) u16 or u32, mapped from disk
    bits: npt.NDArray[np.uint8]  # (N, ceil(row_len / 8)), the mask, eight places a byte

    @classmethod
    def open(cls, directory: Path) -> Self:
        """What `write_rows` wrote."""
        tokens, bits = (np.load(directory / name, mmap_mode="r") for name in (_TOKENS, _BITS))
        return cls(tokens=tokens, bits=bits)

    @classmethod
    def find(cls, directory: Path, *, row_len: int) -> Self | None:
        """The same, or None when there are no such rows, or they are damaged."""
        try:
            rows = cls.open(directory)
        except (OSError, ValueError, EOFError):
            return None
        shapes = [(rows.tokens.shape[0], row_len), (rows.tokens.shape[0], -(-row_len // 8))]
        return rows if [rows.tokens.shape, rows.bits.shape] == shapes else None

    def take(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
        """Tokens (n, row_len) u16 or u32 and mask (n, row_len) of the rows with these numbers."""
        mask = np.unpackbits(self.bits[ids], axis=1, count=self.tokens.shape[1])
        return self.tokens[ids], mask


def conversation_rows(
    conversations: Sequence[Conversation],
    tokenizer: Path,
    directory: Path,
    *,
    row_len: int,
    writes: bool = True,
    barrier: Callable[[], None] = lambda: None,
    tell: Callable[[str], None] = lambda text: None,
    processes: int | None = None,
) -> ChatRows:
    """The rows of all conversations, in a `directory` that one rank of each node writes, be it one
    that the nodes share.

    `tokenizer` is the directory of one. Parts of `conversations` travel between processes, as parts
    of files of examples and of mixtures of them do. The ranks that do not write wait, however long
    that takes; where the one that does fails, its launcher ends them. Rows that an earlier attempt
    left in `directory` are taken as they are: it is to hold rows of these conversations and this
    tokenizer alone, as a job's does. `barrier` waits for every rank; `tell` gets a line every few
    seconds. Conversations longer than a row are cut off. The result depends neither on `processes`
    (None: every core, where it is worth while) nor on who writes.

    Raises DataError when there is no token to learn from.
    """
    if writes:  # what it removes, another node may be removing too
        for leftover in directory.parent.glob(_scratch_prefix(directory) + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if ChatRows.find(directory, row_len=row_len) is None:
            shutil.rmtree(directory, ignore_errors=True)
            assert not directory.exists(), f"{directory} cannot be removed"
    barrier()
    if writes and not directory.exists():
        if processes is None:
            processes = 1 if len(conversations) <= _FEW else usable_cores()
        starts = range(0, len(conversations), _PIECE)
        parts = [conversations[start : start + _PIECE] for start in starts]
        # What a process is started with has to be small: multiprocessing would wait for ever to
        # hand much to one that died at once. So each loads the tokenizer for itself.
        work = partial(_render_there, tokenizer, row_len)
        if processes == 1:
            work = partial(_render, Tokenizer.load(tokenizer), row_len)
        pieces = map_in_processes(work, parts, processes=processes)
        told = _telling(pieces, len(conversations), f"packing {directory.name}", tell)
        write_rows(told, directory, row_len=row_len)
    while not directory.exists():
        time.sleep(_POLL_SECONDS)
    return ChatRows.open(directory)


def _telling(
    pieces: Iterable[Piece], total: int, what: str, tell: Callable[[str], None]
) -> Iterator[Piece]:
    """The pieces; tells how many conversations they are."""
    tell(f"{what}: {total:,} conversations")
    done, told = 0, time.monotonic()
    for piece in pieces:
        yield piece
        done += len(piece.lengths)
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            tell(f"{what}: {done:,} of {total:,} conversations")


def _render(tokenizer: Tokenizer, row_len: int, conversations: Sequence[Conversation]) -> Piece:
    rendered = (render_conversation(tokenizer, c, max_tokens=row_len) for c in conversations)
    return make_piece(rendered, dtype=dtype_for(tokenizer.vocab_size))


def _render_there(directory: Path, row_len: int, conversations: Sequence[Conversation]) -> Piece:
    return _render(_load_once(directory), row_len, conversations)


@lru_cache(maxsize=1)  # of a process that renders many pieces
def _load_once(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def make_piece(rendered: Iterable[Rendered], *, dtype: str) -> Piece:
    """The conversations in the order given."""
    kind = np.dtype(dtype).newbyteorder("<")
    ids, mask, lengths = array(kind.char), bytearray(), array("I")
    for its_ids, its_mask in rendered:
        assert len(its_ids) == len(its_mask), f"{len(its_ids)} tokens, a mask of {len(its_mask)}"
        ids.extend(its_ids)
        mask.extend(its_mask)
        lengths.append(len(its_ids))
    return Piece(
        ids=np.array(ids, dtype=kind),
        mask=np.array(mask, dtype=np.uint8),
        lengths=np.array(lengths, dtype=np.uint32),
    )


def write_rows(pieces: Iterable[Piece], directory: Path, *, row_len: int) -> None:
    """Write a `directory` of rows that hold every conversation once, whole, from <|bos|> on.

    It is whole or absent, and depends on the conversations and `row_len` alone. Each must begin
    with <|bos|>, which also pads, and be at most `row_len` long. Raises DataError when there is no
    token to learn from.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=directory.parent, prefix=_scratch_prefix(directory)
    ) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        _write_arrays(_gather(pieces, Path(scratch)), made, row_len=row_len)
        sync_directory(made)
        # A directory cannot replace another one: on a disk that nodes share, the first stays.
        try:
            made.rename(directory)
        except OSError:
            if not directory.exists():
                raise
        sync_directory(directory.parent)


def _scratch_prefix(directory: Path) -> str:
    """What the names begin with below which `directory` is made, so that a later attempt finds what
    a killed one left; another node may be making another directory beside it."""
    return f".{directory.name}-"


def _gather(pieces: Iterable[Piece], scratch: Path) -> Piece:
    """All pieces as one, of which ids and mask are mapped from files in `scratch`."""
    kind, learnt, lengths = np.dtype("<u2"), 0, array("I")
    with (scratch / "ids").open("wb") as ids_file, (scratch / "mask").open("wb") as mask_file:
        for piece in pieces:
            kind = piece.ids.dtype
            learnt += int(piece.mask.sum())
            write_array(ids_file, piece.ids)
            write_array(mask_file, piece.mask)
            lengths.extend(piece.lengths.tolist())
    check_size(scratch / "ids", sum(lengths) * kind.itemsize)
    check_size(scratch / "mask", sum(lengths))
    if not learnt:
        raise DataError(
            "the mixture has no token to learn from",
            hint="a conversation needs at least one assistant message",
        )
    return Piece(
        ids=np.memmap(scratch / "ids", dtype=kind, mode="r"),
        mask=np.memmap(scratch / "mask", dtype=np.uint8, mode="r"),
        lengths=np.array(lengths, dtype=np.uint32),
    )


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


def _write_arrays(everything: Piece, directory: Path, *, row_len: int) -> None:
    """The two files of `ChatRows`."""
    ids, mask, lengths = everything.ids, everything.mask, everything.lengths.tolist()
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    bos = ids[0]
    assert (ids[starts] == bos).all(), "a conversation begins with another token than the first one"
    rows = assign_rows(lengths, row_len=row_len)
    with (
        new_array(directory / _TOKENS, ids.dtype, (len(rows), row_len)) as tokens_file,
        new_array(directory / _BITS, mask.dtype, (len(rows), -(-row_len // 8))) as bits_file,
    ):
        for first in range(0, len(rows), _PIECE):
            some = rows[first : first + _PIECE]
            tokens = np.full((len(some), row_len), bos, dtype=ids.dtype)
            learnt = np.zeros((len(some), row_len), dtype=np.uint8)
            for row, members in enumerate(some):
                place = 0
                for member in members:
                    start, length = int(starts[member]), lengths[member]
                    tokens[row, place : place + length] = ids[start : start + length]
                    learnt[row, place : place + length] = mask[start : start + length]
                    place += length
            write_array(tokens_file, tokens)
            write_array(bits_file, np.packbits(learnt, axis=1))
