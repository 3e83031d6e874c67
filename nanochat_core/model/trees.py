"""Texts that begin alike, read as one tree: what they share once, then a branch for each.

Trees are packed one after the other into one row without padding. A token stands at the position it
has in its own text, and sees its ancestors inside the window and itself: the logits are those of
each text alone.

On a CPU each tree attends by itself, its trunk causally and in blocks of the window, so nothing is
multiplied that a mask hides but for the branches among themselves. On a GPU, where starting a
kernel costs more than what it computes in vain, one mask serves the whole pack; it has met no GPU.

Shapes: N tokens of a pack, R rows that are read, S keys, H query heads, K key/value heads, D head
dim.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nanochat_core.model.attention import attend
from nanochat_core.model.attention_backends import mixed
from nanochat_core.model.gpt import GPT, Attend

TRUNK = -1  # the branch of tokens that all branches share
_CPU_TOKENS, _GPU_TOKENS = 1024, 4096  # of a pass: what stays in a CPU's cache, what fills a GPU


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Token ids of a trunk, at least one, and of what continues it."""

    trunk: Sequence[int]
    branches: tuple[Sequence[int], ...]
    rows: Sequence[int]  # that are read: places in the trunk and the branches, in their order

    @cached_property
    def num_tokens(self) -> int:
        """Of the trunk and all branches."""
        return len(self.trunk) + sum(map(len, self.branches))


@dataclass(frozen=True, kw_only=True)
class _Block:
    """Some queries of a pack, in the order in which they come, and the keys they may see."""

    queries: slice
    keys: slice
    mask: Tensor | None  # (queries, keys) bool; None: a trunk, causal inside the window


class PackedTree:
    """Trees one after the other, on the model's device."""

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
        """What lm_head reads (R, C) of every tree's rows, in their order."""
        mix = self.attention(model.config.windows, whole=self._device.type != "cpu")
        return model.forward_tree(self.tokens, self.parents, self.positions, self.rows, mix)

    def attention(self, windows: Sequence[int], *, whole: bool) -> Attend:
        """Attention for `GPT.forward_tree`: under one mask, or else tree by tree."""
        last = len(windows) - 1
        layers = {(window, layer == last) for layer, window in enumerate(windows)}
        split = self._whole if whole else self._tree_by_tree
        blocks = {key: list(split(*key)) for key in layers}

        def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = windows[layer]
            out = torch.empty_like(q)
            for block in blocks[window, layer == last]:
                asking, keys = q[:, block.queries], slice(block.keys.start, block.keys.stop)
                if block.mask is None:
                    answer = attend(asking, k[:, keys], v[:, keys], window=window)
                else:
                    seen, values = k[:, keys].transpose(1, 2), v[:, keys].transpose(1, 2)
                    answer = mixed(asking.transpose(1, 2), seen, values, block.mask).transpose(1, 2)
                out[:, block.queries] = answer
            return out

        return mix

    def _whole(self, window: int, rows_only: bool) -> Iterator[_Block]:
        tree = torch.from_numpy(np.repeat(np.arange(len(self._sizes)), self._sizes))
        tree, asking = tree.to(self._device), slice(None)
        queries = self.rows if rows_only else torch.arange(len(tree), device=self._device)
        branch = torch.from_numpy(self._branch).to(self._device)
        distance = self.positions[queries, None] - self.positions
        mask = (tree[queries, None] == tree) & (distance >= 0) & (distance <= window)
        mask &= (branch == TRUNK) | (branch[queries, None] == branch)
        yield _Block(queries=asking, keys=asking, mask=mask)

    def _tree_by_tree(self, window: int, rows_only: bool) -> Iterator[_Block]:
        if not rows_only:
            for first, fork, size in zip(self._firsts, self._forks, self._sizes, strict=True):
                end = first + size
                yield _Block(queries=slice(first, fork), keys=slice(first, fork), mask=None)
                if fork < end:
                    asking = np.arange(fork, end)
                    yield self._masked(asking, slice(fork, end), first, fork, window)
            return
        begin = 0
        for first, fork, rows in zip(self._firsts, self._forks, self._rows, strict=True):
            if len(rows):
                queries = slice(begin, begin + len(rows))
                yield self._masked(rows, queries, first, fork, window)
            begin += len(rows)

    def _masked(
        self, asking: npt.NDArray[np.int64], queries: slice, first: int, fork: int, window: int
    ) -> _Block:
        """What the tokens `asking` see of their tree, from `first` on, with branches from `fork`
        on, where places are no longer positions."""
        position = self._position[asking]
        start = min(first + max(0, int(position.min()) - window), fork)
        keys = slice(start, int(asking.max()) + 1)
        distance = position[:, None] - self._position[keys]
        branch = self._branch[keys]
        mask = (distance >= 0) & (distance <= window)
        mask &= (branch == TRUNK) | (self._branch[asking][:, None] == branch)
        return _Block(queries=queries, keys=keys, mask=torch.from_numpy(mask).to(self._device))


def tokens_of_pack(device: torch.device) -> int:
    """How many tokens a pass through the model had best have."""
    return _CPU_TOKENS if device.type == "cpu" else _GPU_TOKENS


def packs_of(sizes: Iterable[int], most: int) -> Iterator[range]:
    """Neighbours that together have at most `most` tokens, or one alone that has more."""
    begin = held = place = 0
    for place, size in enumerate(sizes):
        if place > begin and held + size > most:
            yield range(begin, place)
            begin, held = place, 0
        held += size
    if held:
        yield range(begin, place + 1)


def _places(
    trees: Sequence[Tree], firsts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Branch, position and parent of every token (N,)."""
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
            parent[-1][:1] = first + length - 1
            place += len(tokens)
    return np.concatenate(branch), np.concatenate(position), np.concatenate(parent)
