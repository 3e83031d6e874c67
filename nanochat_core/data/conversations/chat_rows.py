"""Pack rendered conversations into rows of one length, for midtraining and SFT.

No conversation is cropped, so a row ends in padding: <|bos|> with mask 0. Best fit (the longest
conversation that still fits comes next, equal lengths in the given order) keeps padding small.
Measured on ten thousand conversations: of 20 to 70 tokens in rows of 257, 2 % of all tokens; the
same in rows of 2049, 0.7 %; of 100 to 1000 tokens in rows of 2049, 0.4 %.

A mixture may have half a billion tokens. It is rendered in pieces to files, in parallel processes,
and the rows are written once for all ranks of a node, which map them: memory holds only a few
numbers per conversation.
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

from nanochat_core.data.array_files import new_array, write_array
from nanochat_core.data.processes import map_in_processes, usable_cores
from nanochat_core.data.token_files import dtype_for
from nanochat_core.errors import DataError
from nanochat_core.job import sync_directory
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.chat import render_conversation
from tasks.base import Conversation

_TOKENS, _BITS = "tokens.npy", "mask_bits.npy"
_PIECE = 1024  # conversations rendered at a time, and rows written at a time
_FEW = 16 * _PIECE  # conversations that one process renders faster than others start
_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_LINES = 5.0  # between two progress lines

Rendered: TypeAlias = tuple[Sequence[int], Sequence[int]]  # ids and mask of a conversation


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some rendered conversations, one after the other."""

    ids: npt.NDArray[Any]  # (n,) u16 or u32
    mask: npt.NDArray[np.uint8]  # (n,), 1 where the token has a loss
    lengths: npt.NDArray[np.uint32]  # tokens of each conversation


@dataclass(frozen=True, kw_only=True)
class ChatRows:
    """Packed rows. Targets are tokens[:, 1:] where the mask, [:, 1:] too, is 1."""

    tokens: npt.NDArray[Any]  # (N, row_len) u16 or u32, mapped from disk
    bits: npt.NDArray[np.uint8]  # (N, ceil(row_len / 8)), the mask, eight places per byte

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open what `write_rows` wrote."""
        tokens, bits = (np.load(directory / name, mmap_mode="r") for name in (_TOKENS, _BITS))
        return cls(tokens=tokens, bits=bits)

    @classmethod
    def find(cls, directory: Path, *, row_len: int) -> Self | None:
        """Open the rows, or return None if they are missing, damaged or of another length."""
        try:
            rows = cls.open(directory)
        except (OSError, ValueError, EOFError):
            return None
        shapes = [(rows.tokens.shape[0], row_len), (rows.tokens.shape[0], -(-row_len // 8))]
        return rows if [rows.tokens.shape, rows.bits.shape] == shapes else None

    def take(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
        """Return tokens (n, row_len) u16 or u32 and mask (n, row_len) of these rows."""
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
    log: Callable[[str], None] = lambda text: None,
    processes: int | None = None,
) -> ChatRows:
    """Return the rows of all conversations; one rank of each node writes them to `directory`.

    Nodes may share the `directory`. `tokenizer` is a tokenizer's directory. Slices of
    `conversations` are pickled to other processes. Ranks that do not write wait without limit; if
    the writing rank fails, its launcher ends them. Rows of an earlier attempt in `directory` are
    reused: it must hold only rows of these conversations and this tokenizer, as a job's does.
    `barrier` waits for every rank; `log` gets a progress line every few seconds, and a warning of
    prompts that fill a row. Conversations longer than a row are truncated. The result depends
    neither on `processes` (None means all cores, if that is faster) nor on the rank that writes.

    Raises DataError if no token has a loss.
    """
    # Errors are ignored, as another node may remove the same directories.
    if writes:
        for leftover in directory.parent.glob(_scratch_prefix(directory) + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if ChatRows.find(directory, row_len=row_len) is None:
            shutil.rmtree(directory, ignore_errors=True)
            assert not directory.exists(), f"{directory} cannot be removed"
    # No rank may write or wait before damaged rows are removed.
    barrier()
    if writes and not directory.exists():
        if processes is None:
            processes = 1 if len(conversations) <= _FEW else usable_cores()
        starts = range(0, len(conversations), _PIECE)
        parts = [conversations[start : start + _PIECE] for start in starts]
        # Each process loads the tokenizer itself, as its start arguments must be small:
        # multiprocessing blocks forever on a full pipe if the process has died at its start.
        pieces = map_in_processes(partial(_render, tokenizer, row_len), parts, processes=processes)
        pieces = _with_progress(pieces, len(conversations), f"packing {directory.name}", log)
        write_rows(pieces, directory, row_len=row_len, log=log)
    # Polled rather than a barrier: a collective has a timeout, and packing may take longer.
    while not directory.exists():
        time.sleep(_POLL_SECONDS)
    return ChatRows.open(directory)


def _with_progress(
    pieces: Iterable[Piece], total: int, what: str, log: Callable[[str], None]
) -> Iterator[Piece]:
    """Yield the pieces; log how many conversations they have."""
    log(f"{what}: {total:,} conversations")
    done, logged = 0, time.monotonic()
    for piece in pieces:
        yield piece
        done += len(piece.lengths)
        if time.monotonic() - logged >= _SECONDS_BETWEEN_LINES:
            logged = time.monotonic()
            log(f"{what}: {done:,} of {total:,} conversations")


def _render(directory: Path, row_len: int, conversations: Sequence[Conversation]) -> Piece:
    tokenizer = _load_once(directory)
    rendered = (render_conversation(tokenizer, c, max_tokens=row_len) for c in conversations)
    return make_piece(rendered, dtype=dtype_for(tokenizer.vocab_size))


@lru_cache(maxsize=1)  # of a process that renders many pieces
def _load_once(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def make_piece(rendered: Iterable[Rendered], *, dtype: str) -> Piece:
    """Concatenate rendered conversations in the given order."""
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


def write_rows(
    pieces: Iterable[Piece],
    directory: Path,
    *,
    row_len: int,
    log: Callable[[str], None] = lambda text: None,
) -> None:
    """Write a `directory` of rows that hold every conversation once, complete, from <|bos|> on.

    The directory is complete or absent, and depends only on the conversations and `row_len`. Each
    conversation must begin with <|bos|>, which is also the padding, and have at most `row_len`
    tokens. Raises DataError if no token has a loss.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=directory.parent, prefix=_scratch_prefix(directory)
    ) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        everything = _gather(pieces, Path(scratch), row_len=row_len, log=log)
        _write_arrays(everything, made, row_len=row_len)
        # The names of its files must be durable before its own.
        sync_directory(made)
        # A rename cannot replace a directory that is not empty: on a disk that nodes share, the
        # first one stays, and the others are equal to it.
        try:
            made.rename(directory)
        except OSError:
            if not directory.exists():
                raise
        sync_directory(directory.parent)


def _scratch_prefix(directory: Path) -> str:
    """Return the prefix of the scratch directories in which `directory` is made.

    By it a later attempt finds those that a killed one left.
    """
    return f".{directory.name}-"


def _gather(
    pieces: Iterable[Piece], scratch: Path, *, row_len: int, log: Callable[[str], None]
) -> Piece:
    """Write all pieces to files in `scratch`; return them as one, with ids and mask mapped."""
    kind, num_targets, lengths = np.dtype("<u2"), 0, array("I")
    num_cut = 0  # conversations that fill a row before their first answer
    with (scratch / "ids").open("wb") as ids_file, (scratch / "mask").open("wb") as mask_file:
        for piece in pieces:
            kind = piece.ids.dtype
            num_targets += int(piece.mask.sum())
            if len(piece.lengths):
                starts = np.cumsum([0, *piece.lengths[:-1]], dtype=np.int64)
                has_target = np.logical_or.reduceat(piece.mask, starts)
                num_cut += int(((piece.lengths == row_len) & ~has_target).sum())
            write_array(ids_file, piece.ids)
            write_array(mask_file, piece.mask)
            lengths.extend(piece.lengths.tolist())
    cut = (
        f"{num_cut:,} of {len(lengths):,} conversations fill a row of {row_len - 1:,} tokens "
        "before their first answer"
    )
    mend = "shorten their prompts, or train with a larger rows.sequence_len"
    if not num_targets:
        raise DataError(
            f"the mixture has no token to learn from{f': {cut}' if num_cut else ''}",
            hint=mend if num_cut else "a conversation needs at least one assistant message",
        )
    if num_cut:
        log(f"warning: {cut}, so nothing is learnt from them: {mend}")
    return Piece(
        ids=np.memmap(scratch / "ids", dtype=kind, mode="r"),
        mask=np.memmap(scratch / "mask", dtype=np.uint8, mode="r"),
        lengths=np.array(lengths, dtype=np.uint32),
    )


def assign_rows(lengths: Sequence[int], *, row_len: int) -> list[list[int]]:
    """Return for each row the indices of its conversations. Fast if lengths repeat."""
    waiting: dict[int, deque[int]] = {}  # length -> indices, in the order given
    for index, length in enumerate(lengths):
        assert 0 < length <= row_len, f"{length} tokens do not fit a row of {row_len}"
        waiting.setdefault(length, deque()).append(index)
    kinds = sorted(waiting)
    rows: list[list[int]] = []
    while kinds:
        members: list[int] = []
        space = row_len
        # The longest waiting length that still fits.
        while position := bisect_right(kinds, space):
            length = kinds[position - 1]
            members.append(waiting[length].popleft())
            space -= length
            if not waiting[length]:
                kinds.pop(position - 1)
        rows.append(members)
    return rows


def _write_arrays(everything: Piece, directory: Path, *, row_len: int) -> None:
    """Write the two files of `ChatRows`."""
    ids, mask, lengths = everything.ids, everything.mask, everything.lengths.tolist()
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64)
    bos = ids[0]
    # Padding is the first token of the first conversation, so all must begin with it.
    assert (ids[starts] == bos).all(), "a conversation begins with another token than the first one"
    rows = assign_rows(lengths, row_len=row_len)
    with (
        new_array(directory / _TOKENS, ids.dtype, (len(rows), row_len)) as tokens_file,
        new_array(directory / _BITS, mask.dtype, (len(rows), -(-row_len // 8))) as bits_file,
    ):
        for first in range(0, len(rows), _PIECE):
            some = rows[first : first + _PIECE]
            # Filled with padding first; its mask stays 0.
            tokens = np.full((len(some), row_len), bos, dtype=ids.dtype)
            targets = np.zeros((len(some), row_len), dtype=np.uint8)
            for row, members in enumerate(some):
                place = 0
                for member in members:
                    start, length = int(starts[member]), lengths[member]
                    tokens[row, place : place + length] = ids[start : start + length]
                    targets[row, place : place + length] = mask[start : start + length]
                    place += length
            write_array(tokens_file, tokens)
            write_array(bits_file, np.packbits(targets, axis=1))
