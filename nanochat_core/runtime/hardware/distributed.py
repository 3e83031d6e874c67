"""The ranks of a job and their collective operations. One rank needs no process group."""

import atexit
import dataclasses
import datetime
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

# Before torch 2.13 they have other names, which it deprecates.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Longer than the launcher's `hang_seconds` (runtime/heartbeat.py), which can name the rank that
# hangs; a collective's timeout cannot.
PATIENCE = datetime.timedelta(hours=1)
TIME_TO_JOIN = datetime.timedelta(seconds=120)  # from the first rank to the last one


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the job's processes."""

    rank: int
    local_rank: int
    size: int
    # A separate group for control messages (any, barrier): collectives match by their order in a
    # group, and a sum that a hook starts may come before or after them. None means one group.
    control: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """True on rank 0, the rank that writes files and events."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place; return the tensor."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def start_sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start to sum over all ranks, in place. Wait for the result; None means it is done."""
        return dist.all_reduce(tensor, async_op=True) if self.size > 1 else None

    def start_sum_to_owners(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start a reduce-scatter in place: each rank gets the sum of its equal share of dimension
        0, in the order of ranks. The rest of its tensor is undefined afterwards."""
        if self.size == 1:
            return None
        own = tensor.chunk(self.size)[self.rank]
        return _REDUCE_SCATTER(own, tensor, async_op=True)

    def start_share(self, tensor: torch.Tensor) -> dist.Work | None:
        """Start an all-gather in place: each rank contributes its equal share of dimension 0."""
        if self.size == 1:
            return None
        return _ALL_GATHER(tensor, tensor.chunk(self.size)[self.rank], async_op=True)

    def any_of(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any rank has set it. Collective.

        One message for all flags, over the CPU's group, so the device is not waited for. Used for
        decisions that all ranks must take at the same step, such as stopping.
        """
        if self.size == 1:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.int64)
        dist.all_reduce(votes, group=self.control)
        return [vote > 0 for vote in votes.tolist()]

    def any(self, flag: bool) -> bool:
        """Return whether any rank has set the flag. Collective."""
        return self.any_of(flag)[0]

    def first_text(self, text: str | None) -> str | None:
        """Return the text of the lowest rank that has one, on every rank; None if no rank has."""
        return next((t for t in self.gather(text) if t is not None), None)

    def gather(self, item: Any) -> list[Any]:
        """Return every rank's JSON value, in the order of ranks, on every rank. Collective."""
        if self.size == 1:
            return [item]
        # Not torch's `all_gather_object`: it unpickles what another host sent, so that any process
        # that reaches the ranks' ports could execute code.
        text = torch.frombuffer(bytearray(json.dumps(item).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(text)
        dist.all_reduce(lengths, group=self.control)
        # Padded to the longest: a collective's tensors must have one shape on all ranks.
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


def local_rank() -> int:
    """Return the number of this process among those of its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def open_world(device: torch.device) -> World:
    """Join the process group that the environment describes; without it, a world of one.

    `device` is this rank's own (`open_device`).

    Raises torch's DistError if ranks that no torchrun started have not met in time.
    """
    world = World(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=local_rank(),
        size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    if world.size == 1:
        return world
    if not dist.is_initialized():
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
            store=_meet(world),
            rank=world.rank,
            world_size=world.size,
            timeout=PATIENCE,
            # Connects eagerly: the first collective would otherwise wait for all ranks to connect.
            device_id=device if on_gpu else None,
        )
        # Without this, gloo's threads crashed at interpreter exit in 3 of 6 runs of two ranks.
        atexit.register(close_world)
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    assert isinstance(control, dist.ProcessGroup)
    return dataclasses.replace(world, control=control)


def _meet(world: World) -> Store | None:
    """Return a store that all ranks have reached; None where torchrun has one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, world.size, world.is_first, timeout=TIME_TO_JOIN)
    store.set_timeout(PATIENCE)
    return store


def close_world() -> None:
    """Leave the process group, if there is one. Also an exit hook, which a worker leaves out."""
    if dist.is_initialized():
        dist.destroy_process_group()
