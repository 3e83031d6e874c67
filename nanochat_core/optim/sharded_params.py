"""Parameters in one buffer, divided among the ranks: each owns an equal slice of the items.

An item is a matrix (Muon: matrices of one shape are stacked) or a row of a table (AdamW). Every
rank holds the working weights of all items, of which the model's parameters are views, and all of
its own gradients; masters and optimizer state of an item exist on its owner only (ZeRO-2).

    weights            (W * n, ...)   working weights; the same on every rank
    gradients          (W * n, ...)   of this rank; its owned slice becomes the sum over ranks
    masters, state     (n, ...)       of the owned items: rank r owns r * n up to (r + 1) * n

W is the world size, n the items of a rank. Items that pad the last slice are zero and stay zero.
Working weights and masters of the same dtype share storage, so that at fp32 nothing is copied.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanochat_core.errors import ModelError
from nanochat_core.optim.groups import AdamWGroup
from nanochat_core.runtime.hardware.distributed import ALONE, World

Read = Callable[[str], Tensor]  # the whole tensor of a key, on the CPU


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part: a parameter's items in a stack, from `first` up to `first + count`."""

    name: str
    parameter: nn.Parameter
    first: int
    count: int


class ShardedParams:
    """Parameters in one buffer, their gradients, and this rank's share of masters and state."""

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        *,
        group: AdamWGroup | None,
        lr: float,
        state: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        world: World,
        replicated: bool = False,
    ) -> None:
        """Move the parameters, of one shape and dtype, into a buffer; they become views of it.

        `group`: AdamW's constants, and an item is a row of a parameter; None means Muon, and an
        item is a parameter. `lr`: before the schedule's factor. `state` maps each kind of
        optimizer state to its shape for one item. `dtype` is that of the working weights; a
        parameter that is not fp32 keeps its dtype and is its own master. `replicated`: every
        rank owns all items, and gradients are all-reduced.
        """
        like = next(iter(parameters.values()))
        assert len({(p.shape, p.dtype, p.device) for p in parameters.values()}) == 1
        self.replicated, self.group, self.lr = replicated, group, lr
        self._world, self._by_row = world, group is not None
        count = like.size(0) if self._by_row else 1
        self.parts = [
            Part(name=name, parameter=p, first=i * count, count=count)
            for i, (name, p) in enumerate(parameters.items())
        ]
        owner = ALONE if replicated else world
        owned = -(-len(self.parts) * count // owner.size)
        self._owned = slice(owner.rank * owned, (owner.rank + 1) * owned)
        shape = (owned * owner.size, *(like.shape[1:] if self._by_row else like.shape))
        initial = torch.zeros(shape, dtype=like.dtype, device=like.device)
        for part in self.parts:
            self._of(part, initial).copy_(part.parameter.detach())
        self._weights = initial.to(dtype if like.dtype == torch.float32 else like.dtype)
        for part in self.parts:
            part.parameter.data = self._of(part, self._weights)
        self.masters = initial[self._owned]
        if self._weights is not initial and owned < len(initial):
            self.masters = self.masters.clone()  # frees the fp32 items that this rank does not own
        self.state = {kind: self.masters.new_zeros((owned, *item)) for kind, item in state.items()}
        self.num_elements = initial.numel()
        self._gradients: Tensor | None = None
        self._buffer: Tensor | None = None
        self._taken: set[str] = set()
        self._pending: dist.Work | None = None

    def take_gradient(self, part: Part) -> None:
        """Add the parameter's gradient to this step's, in fp32, and clear `parameter.grad`."""
        grad, part.parameter.grad = part.parameter.grad, None
        assert grad is not None
        whole = grad.numel() == self._weights.numel()
        if self._gradients is None and whole and grad.dtype == self.masters.dtype:
            # The parameter is the whole stack: use its gradient without a copy. If another comes,
            # `_in_fp32` moves the sum to the buffer.
            self._gradients = grad.contiguous().view(self._weights.shape)
        else:
            into, holds = self.take_sum(part)
            (into.add_ if holds else into.copy_)(grad)
        self._taken.add(part.name)

    def take_sum(self, part: Part) -> tuple[Tensor, bool]:
        """Return the fp32 sum of the parameter's gradients, and whether it holds any of this step.

        The caller must add a gradient to it; where it holds none, all of it must be overwritten.
        """
        assert self._pending is None, f"{part.name}: a gradient after its reduction has started"
        holds = part.name in self._taken
        self._taken.add(part.name)
        return self._of(part, self._in_fp32()), holds

    def start_reduce_scatter(self) -> None:
        """Start to sum the gradients at their owners. One that this rank lacks counts as zero."""
        for part in self.parts:
            if part.name not in self._taken:
                self._of(part, self._in_fp32()).zero_()
        if self._world.size == 1:
            return
        # The previous reduction may have left any values in items that this rank does not own. New
        # gradients overwrite them, except in the padding, which belongs to no parameter.
        self._in_fp32()[len(self.parts) * self.parts[0].count :].zero_()
        if self.replicated:
            self._pending = self._world.start_sum(self._in_fp32())
        else:
            self._pending = self._world.start_sum_to_owners(self._in_fp32())

    def summed_gradients(self) -> Tensor:
        """Wait for the sum over ranks; return it for the owned items (n, ...).

        In fp32, but on a CPU in the masters' dtype. The caller may overwrite it.
        """
        self._wait()
        assert self._gradients is not None
        gradients = self._gradients[self._owned]
        # torch's AdamW takes gradients in its parameters' dtype. On a GPU it need not be torch's.
        return gradients if gradients.is_cuda else gradients.to(self.masters.dtype)

    def drop_gradients(self) -> None:
        """Discard this step's gradients, after waiting for a reduction that is in progress."""
        self._wait()
        self._gradients = None
        self._taken.clear()

    def start_all_gather(self) -> None:
        """Start the all-gather of the updated weights."""
        if self.masters.dtype != self._weights.dtype:
            self._weights[self._owned].copy_(self.masters)
        if not self.replicated:
            self._pending = self._world.start_share(self._weights)

    def finish_all_gather(self) -> None:
        """Wait until this rank has the working weights of every owner."""
        self._wait()
        # The collective writes to the buffer unseen by autograd; fp8.Quantised watches the version.
        torch.autograd.graph.increment_version([part.parameter for part in self.parts])

    def pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank owns, by key; the first rank yields the replicated items."""
        if self.replicated and not self._world.is_first:
            return
        for kind, stacked in self._kinds():
            for part in self.parts:
                rows = self._owned_rows(part)
                if rows.start >= rows.stop:
                    continue
                key = f"{kind}/{part.name}"
                if len(range(*rows.indices(part.count))) < part.count:
                    key += f"#{rows.start}"
                yield key, self._piece(part, rows, stacked)

    def load(self, read: Read) -> None:
        """Load the owned masters and state. Every rank must then call `start_all_gather`."""
        for kind, stacked in self._kinds():
            for part in self.parts:
                rows = self._owned_rows(part)
                if rows.start >= rows.stop:
                    continue
                key = f"{kind}/{part.name}"
                saved, piece = read(key), self._piece(part, rows, stacked)
                shape = (part.count, *piece.shape[1:]) if self._by_row else tuple(piece.shape)
                if tuple(saved.shape) != shape:
                    raise ModelError(
                        f"the saved {key} has shape {tuple(saved.shape)}, the model needs {shape}"
                    )
                piece.copy_(saved[rows] if self._by_row else saved)

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors by key, on the host of the first rank; none elsewhere. Collective."""
        for kind, stacked in self._kinds():
            whole = stacked
            if self._world.size > 1 and not self.replicated:
                whole = stacked.new_zeros((len(stacked) * self._world.size, *stacked.shape[1:]))
                whole[self._owned] = stacked
                pending = self._world.start_share(whole)
                assert pending is not None
                pending.wait()
            if self._world.is_first:
                for part in self.parts:
                    yield f"{kind}/{part.name}", self._of(part, whole).cpu().clone()

    def _kinds(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.masters
        yield from self.state.items()

    def _of(self, part: Part, stacked: Tensor) -> Tensor:
        """Return the part's view of a tensor of all items."""
        if self._by_row:
            return stacked[part.first : part.first + part.count]
        return stacked[part.first]

    def _owned_rows(self, part: Part) -> slice:
        """Return the part's items that this rank owns; start >= stop means none."""
        return slice(
            max(self._owned.start - part.first, 0),
            min(self._owned.stop - part.first, part.count),
        )

    def _piece(self, part: Part, rows: slice, stacked: Tensor) -> Tensor:
        """Return the part's `rows` in a tensor of the owned items."""
        first = part.first - self._owned.start
        if self._by_row:
            return stacked[first + rows.start : first + rows.stop]
        return stacked[first]

    def _in_fp32(self) -> Tensor:
        """Return the fp32 tensor that accumulates the step's gradients."""
        # Either the first gradient itself, if it is fp32, or a buffer that is reused by all steps:
        # on a CPU, allocating it in each step would cost more than the sum.
        gradients = self._gradients
        if gradients is None or gradients.dtype != torch.float32:
            if self._buffer is None:
                self._buffer = torch.zeros_like(self._weights, dtype=torch.float32)
            self._gradients = self._buffer if gradients is None else self._buffer.copy_(gradients)
        assert self._gradients is not None
        return self._gradients

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
