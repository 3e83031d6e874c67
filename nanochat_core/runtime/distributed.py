"""The ranks of a job, and what they do together. One rank needs no process group."""

import atexit
import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the job's processes."""

    rank: int
    local_rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and events."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; returns the tensor."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank, so that all ranks stop at the same step."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(int(flag))).item())

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()


def open_world(device: str) -> World:
    """Join the process group that torchrun's environment describes; without one, a world of one."""
    world = World(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    if world.size > 1 and not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(minutes=10))
        # Left to the interpreter's end, gloo's threads crashed in 3 of 6 runs of two ranks.
        atexit.register(dist.destroy_process_group)
    return world
