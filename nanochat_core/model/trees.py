"""Forward passes over texts with a common prefix: the prefix is computed once, as a tree's trunk.

Trees are packed one after the other into one row without padding. A token has the position that it
has in its own text, and sees its ancestors inside the window and itself: the logits are those of
each text alone.

On a CPU attention runs per tree, the trunk causally and in blocks of the window, so little is
computed that a mask hides. On a GPU, where a kernel launch costs more than masked-out work, one
mask covers the whole pack; that path has not been run on a GPU.

Shapes: N tokens of a pack, R output rows, S keys, H query heads, K key/value heads, D head dim.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanochat_core.model.attention import attend
from nanochat_core.model.attention_backends import mixed
from nanochat_core.model.gpt import GPT, Attend

TRUNK = -1  # the branch of tokens that all branches share
_CPU_TOKENS, _GPU_TOKENS = 1024, 4096  # per pass: fits a CPU's cache; enough to fill a GPU


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Token ids of a shared prefix (the trunk, at least one token) and of its continuations."""

    trunk: Sequence[int]
    branches: tuple[Sequence[int], ...]
    rows: Sequence[int]  # whose output is wanted: indices into the trunk and then the branches

    @cached_property
    def num_tokens(self) -> int:
        """The tokens of the trunk and all branches."""
        return len(self.trunk) + sum(map(len, self.branches))


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A contiguous range of a pack's queries and the keys they may see."""

    queries: slice
    keys: slice
    mask: Tensor | None  # (queries, keys) bool; None means a trunk: causal inside the window


class PackedTree:
    """Trees packed one after the other, on the model's device."""

    def __init__(self, trees: Sequence[Tree], device: torch.device) -> None:
        assert all(len(tree.trunk) for tree in trees), "a tree without a trunk"
        self._sizes = [tree.num_tokens for tree in trees]
        self._firsts = np.cumsum([0, *self._sizes[:-1]])
        self._forks = self._firsts + [len(tree.trunk) for tree in trees]
        self._branch, self._position, parents = _places(trees, self._firsts)
        self._rows = [
            first + np.asarray(tree.rows, dtype=np.int64)
            for first, tree in zip(self._firsts, trees, strict=True)
        ]
        pieces = [piece for tree in trees for piece in (tree.trunk, *tree.branches)]
        tokens = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
        self.tokens = torch.from_numpy(tokens).to(device)
        self.parents = torch.from_numpy(parents).to(device)
        self.positions = torch.from_numpy(self._position).to(device)
        self.rows = torch.from_numpy(np.concatenate(self._rows)).to(device)
        self._device = device

    def read(self, model: GPT) -> Tensor:
        """Run the model; return lm_head's input (R, C) at every tree's rows, in their order."""
        attends = self.attention(model.config.windows, whole=self._device.type != "cpu")
        return model.forward_tree(self.tokens, self.parents, self.positions, self.rows, attends)

    def attention(self, windows: Sequence[int], *, whole: bool) -> list[Attend]:
        """Return each layer's attention, under one mask if `whole`, else per tree."""
        # Layers of one window share masks. The last layer has queries only at the output rows.
        last = len(windows) - 1
        layers = {(window, layer == last) for layer, window in enumerate(windows)}
        split = self._whole if whole else self._tree_by_tree
        blocks = {key: list(split(*key)) for key in layers}

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = windows[layer]
            out = torch.empty_like(q)
            for block in blocks[window, layer == last]:
                queries, keys = q[:, block.queries], slice(block.keys.start, block.keys.stop)
                if block.mask is None:
                    result = attend(queries, k[:, keys], v[:, keys], window=window)
                else:
                    seen, values = k[:, keys].transpose(1, 2), v[:, keys].transpose(1, 2)
                    result = mixed(queries.transpose(1, 2), seen, values, block.mask)
                    result = result.transpose(1, 2)
                out[:, block.queries] = result
            return out

        return [partial(mix, layer) for layer in range(len(windows))]

    def _whole(self, window: int, rows_only: bool) -> Iterator[_Block]:
        tree = torch.from_numpy(np.repeat(np.arange(len(self._sizes)), self._sizes))
        tree, everything = tree.to(self._device), slice(None)
        queries = self.rows if rows_only else torch.arange(len(tree), device=self._device)
        branch = torch.from_numpy(self._branch).to(self._device)
        distance = self.positions[queries, None] - self.positions
        mask = (tree[queries, None] == tree) & (distance >= 0) & (distance <= window)
        mask &= (branch == TRUNK) | (branch[queries, None] == branch)
        yield _Block(queries=everything, keys=everything, mask=mask)

    def _tree_by_tree(self, window: int, rows_only: bool) -> Iterator[_Block]:
        if not rows_only:
            for first, fork, size in zip(self._firsts, self._forks, self._sizes, strict=True):
                end = first + size
                yield _Block(queries=slice(first, fork), keys=slice(first, fork), mask=None)
                if fork < end:
                    tokens = np.arange(fork, end)
                    yield self._masked(tokens, slice(fork, end), first, fork, window)
            return
        begin = 0
        for first, fork, rows in zip(self._firsts, self._forks, self._rows, strict=True):
            if len(rows):
                queries = slice(begin, begin + len(rows))
                yield self._masked(rows, queries, first, fork, window)
            begin += len(rows)

    def _masked(
        self, tokens: npt.NDArray[np.int64], queries: slice, first: int, fork: int, window: int
    ) -> _Block:
        """Return the block of `tokens` of the tree that begins at `first` and forks at `fork`."""
        position = self._position[tokens]
        # In the trunk, index - first is the position, so the window bounds the first key. From the
        # fork on it is not: a later branch's token may have an earlier position.
        start = min(first + max(0, int(position.min()) - window), fork)
        keys = slice(start, int(tokens.max()) + 1)
        distance = position[:, None] - self._position[keys]
        branch = self._branch[keys]
        mask = (distance >= 0) & (distance <= window)
        mask &= (branch == TRUNK) | (self._branch[tokens][:, None] == branch)
        return _Block(queries=queries, keys=keys, mask=torch.from_numpy(mask).to(self._device))


def tokens_of_pack(device: torch.device) -> int:
    """Return the number of tokens at which a forward pass is most efficient."""
    return _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS


def packs_of(sizes: Iterable[int], most: int) -> Iterator[range]:
    """Group neighbours into packs of at most `most` tokens; a larger one is a pack by itself."""
    begin = held = index = 0
    for index, size in enumerate(sizes):
        if index > begin and held + size > most:
            yield range(begin, index)
            begin, held = index, 0
        held += size
    if held:
        yield range(begin, index + 1)


def _places(
    trees: Sequence[Tree], firsts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return branch, position and parent of every token (N,)."""
    branch, position, parent = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for tree, first in zip(trees, firsts, strict=True):
        length = len(tree.trunk)
        branch.append(np.full(length, TRUNK))
        position.append(np.arange(length))
        parent.append(np.arange(first - 1, first - 1 + length))
        parent[-1][0] = -1
        place = first + length
        for i, tokens in enumerate(tree.branches):
            branch.append(np.full(len(tokens), i))
            position.append(np.arange(length, length + len(tokens)))
            parent.append(np.arange(place - 1, place - 1 + len(tokens)))
            parent[-1][:1] = first + length - 1  # the trunk's last token; a branch may be empty
            place += len(tokens)
    return np.concatenate(branch), np.concatenate(position), np.concatenate(parent)
