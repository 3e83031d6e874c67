"""The ranks of a job, and what they do together. One rank needs no process group."""

import atexit
import dataclasses
import datetime
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Beyond the launcher's (see runtime/heartbeat.py): it says which rank hangs, a collective does not.
PATIENCE = datetime.timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the job's processes."""

    rank: int
    local_rank: int
    size: int
    # For questions between ranks (any, barrier), beside the group of the sums: so that it does not
    # matter which of the two a rank comes to first. None: the same group.
    control: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and events."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; returns the tensor."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Begin to sum over all ranks, in place. Wait for what is returned; None: it is done."""
        return dist.all_reduce(tensor, async_op=True) if self.size > 1 else None

    def start_sum_to_owners(self, tensor: torch.Tensor) -> dist.Work | None:
        """Begin to sum over all ranks, in place, what each rank owns: its equal share of dimension
        0, in the order of ranks. What the others own is undefined afterwards."""
        if self.size == 1:
            return None
        own = tensor.chunk(self.size)[self.rank]
        return dist.reduce_scatter_single(own, tensor, async_op=True)

    def start_share(self, tensor: torch.Tensor) -> dist.Work | None:
        """Begin to give every rank what each owns: its equal share of dimension 0, in place."""
        if self.size == 1:
            return None
        return dist.all_gather_single(tensor, tensor.chunk(self.size)[self.rank], async_op=True)

    def any_of(self, *flags: bool) -> list[bool]:
        """Whether each flag is set on any rank, so that all ranks stop at the same step, say.

        One question for all of them: it travels on the CPU, beside what the device computes. Every
        rank must ask at the same point.
        """
        if self.size == 1:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.int64)
        dist.all_reduce(votes, group=self.control)
        return [vote > 0 for vote in votes.tolist()]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.any_of(flag)[0]

    def first_text(self, text: str | None) -> str | None:
        """The text of the lowest rank that has one, on every rank; None: no rank has one."""
        return next((t for t in self._gather(text) if t is not None), None)

    def gather(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's item, in the order of ranks, on every rank. Items are JSON trees."""
        return self._gather(item)

    def _gather(self, item: Any) -> list[Any]:
        """Return every rank's JSON value. torch's own `all_gather_object` would unpickle what
        another host sent: whoever reaches the ranks' ports could have code run."""
        if self.size == 1:
            return [item]
        text = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(text)
        dist.all_reduce(lengths, group=self.control)
        # As long as the longest: a collective's tensors are of one shape on all ranks.
        texts = [torch.zeros(int(lengths.max()), dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.zeros_like(texts[0])
        padded[: len(text)] = text
        dist.all_gather(texts, padded, group=self.control)
        pairs = zip(texts, lengths.tolist(), strict=True)
        return [json.loads(text[:length].numpy().tobytes()) for text, length in pairs]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self.control)


ALONE = World(rank=0, local_rank=0, size=1)


def open_world(device: str) -> World:
    """Join the process group that torchrun's environment describes; without one, a world of one."""
    world = World(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    if world.size == 1:
        return world
    if not dist.is_initialized():
        on_gpu = device == "cuda" and torch.cuda.is_available()
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
            timeout=PATIENCE,
            # Ranks meet here once, so that no later sum has to wait for the others to begin.
            device_id=torch.device("cuda", world.local_rank) if on_gpu else None,
        )
        # Left to the interpreter's end, gloo's threads crashed in 3 of 6 runs of two ranks.
        atexit.register(close_world)
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(control, dist.ProcessGroup)
    return dataclasses.replace(world, control=control)


def close_world() -> None:
    """Leave the process group, if there is one. Done at the interpreter's end by itself."""
    if dist.is_initialized():
        dist.destroy_process_group()
