"""What several processes do together with one optimizer, and check of it, on CPUs or on GPUs."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanochat_core.config import ModelConfig, OptimizerConfig
from nanochat_core.job import Job
from nanochat_core.model.gpt import GPT
from nanochat_core.model.matrices import gradient as matrix_gradient
from nanochat_core.model.tables import gradient
from nanochat_core.optim import sharded
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE, World, open_world
from nanochat_core.scaling import numerics, run_for_depth
from nanochat_core.train.loop.checkpoint import (
    CheckpointFacts,
    commit,
    find_checkpoint,
    write_pieces,
)
from nanochat_core.train.loop.step import micro_steps, share_of_targets
from tests.support.nanochat_core.random_gpt import shape_of

CONFIG = shape_of(4, 4, 16, width=32, num_heads=2, vocab_size=60)
RATES = run_for_depth(12).optimizer
CLIPPED = dataclasses.replace(RATES, muon="newton_schulz", muon_weight_decay=0.0, grad_clip=0.01)
CPU = torch.device("cpu")
STEPS = 3
ROWS = 6  # of a step, over all ranks


def adding_lookups() -> Any:
    """A context in which a CPU adds the gradients of tables to their sums, as a GPU does."""
    return mock.patch.object(gradient, "DEVICES", {"cpu", "cuda"})


def make_model(
    precision: str = "fp32", device: torch.device = CPU, config: ModelConfig = CONFIG
) -> GPT:
    with torch.device(device):
        model = GPT(config, numerics(precision))
    model.init_weights(1)
    with torch.no_grad():
        # Zero at first, these would leave the residual scalars gradients of rounding alone, of
        # which AdamW makes whole steps: 1e-7 of the weights grew to 0.03 in three steps.
        for name, parameter in model.named_parameters():
            if name.endswith("c_proj.weight"):
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
                parameter.copy_(0.05 * drawn)
    return model


def train(
    optimizer: Optimizer, model: GPT, world: World, steps: range, *, overlap: bool = True
) -> None:
    """Each rank takes every size-th row, one at a time; in the last step the first takes all."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(60, (ROWS, 17), generator=generator).to(model.lm_head.weight.device)
        own = rows[world.rank :: world.size]
        if step == STEPS - 1:
            own = rows if world.is_first else rows[:0]
        for i, row in enumerate(own):
            loss = model.token_losses(row[None, :-1], row[None, 1:]).sum() / (ROWS * 16)
            optimizer.backward(loss, last=overlap and i == len(own) - 1)
        optimizer.start_reduce_scatter()
        optimizer.step(lr_multiplier=1 / (step + 1), momentum=0.9, weight_decay=0.1)


def add_gradients(
    model: GPT, optimizer: Optimizer, tokens: Tensor, mask: Tensor, *, device_batch_size: int
) -> None:
    """Do a step's passes on one rank, as training on conversations does."""
    share = share_of_targets(mask, ALONE)
    for inputs, targets, last in micro_steps(
        model, tokens, mask, device_batch_size=device_batch_size
    ):
        optimizer.backward(model.summed_loss(inputs, targets, share), last=last)


def gradients_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """This rank's gradients of the step so far, by parameter that has one."""
    return {
        part.name: stack._of(part, stack._gradients)
        for stack in optimizer._stacks
        for part in stack.parts
        if stack._gradients is not None and part.name in stack._taken
    }


def trained_alone(
    rates: OptimizerConfig, steps: int, device: torch.device = CPU
) -> dict[str, Tensor]:
    """The whole state after so many steps of one rank."""
    model = make_model(device=device)
    optimizer = Optimizer(model, rates, precision="fp32", world=ALONE)
    train(optimizer, model, ALONE, range(steps))
    return optimizer.gather()


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By kind of state: the norm of the difference as a share of the norm.

    Of all parameters together: where a gradient is nearly 0, Muon and AdamW make much of its
    rounding.
    """
    assert actual.keys() == expected.keys()
    kinds = sorted({key.partition("/")[0] for key in expected})
    flat = [
        torch.cat([t[key].double().flatten() for key in expected if key.split("/")[0] == kind])
        for kind in kinds
        for t in (actual, expected)
    ]
    return {
        kind: float((one - other).norm() / other.norm())
        for kind, one, other in zip(kinds, flat[::2], flat[1::2], strict=True)
    }


def check_questions(world: World) -> None:
    """Whether any rank says yes; the answers are of their own question."""
    assert world.any_of(*(rank == world.rank for rank in range(world.size))) == [True] * world.size
    assert world.any_of(True, False, world.is_first, False) == [True, False, True, False]
    assert not world.any(False)
    assert world.any(world.rank == 1)
    assert world.first_text(None) is None
    assert world.first_text(None if world.is_first else f"of {world.rank}") == "of 1"


def check_gathering(world: World) -> None:
    """Every rank has every rank's item, whatever the lengths."""
    items = [
        {"r": r, "text": "\u00e9\n" * r, "x": [0.1 * r, None, True]} for r in range(world.size)
    ]
    assert world.gather(items[world.rank]) == items
    assert world.gather({}) == [{}] * world.size


class Noted(World):
    """Ranks that note when a sum of matrices starts."""

    events: ClassVar[list[str]] = []

    def start_sum_to_owners(self, tensor: Tensor) -> dist.Work | None:
        """Start it; tables have two dimensions."""
        if tensor.dim() == 3:
            self.events.append("sum")
        return super().start_sum_to_owners(tensor)


def check_overlap(world: World) -> None:
    """The sums of the last layers' matrices start before the first layer's backward pass."""
    Noted.events.clear()
    noted = Noted(**vars(world))
    with mock.patch.dict(sharded.STACK_ELEMENTS, cpu=1):  # each layer's matrices by themselves
        model = make_model()
        optimizer = Optimizer(model, RATES, precision="fp32", world=noted)
        first = model.get_parameter("transformer.h.0.mlp.c_proj.weight")
        first.register_hook(lambda _: Noted.events.append("backward"))
        train(optimizer, model, noted, range(1))
    # Of several backward passes the last one gives the sums.
    assert Noted.events.index("sum") > 0
    assert "backward" in Noted.events[Noted.events.index("sum") :], Noted.events


def check_training(world: World, root: Path, device: torch.device = CPU) -> None:
    """Two ranks train as one, with sums during the backward pass or after it, with a clip too."""
    for file, rates in (("plain", RATES), ("clipped", CLIPPED)):
        states = []
        for overlap in (True, False):
            model = make_model(device=device)
            optimizer = Optimizer(model, rates, precision="fp32", world=world)
            train(optimizer, model, world, range(STEPS), overlap=overlap)
            states.append({k: v.clone() for k, v in optimizer.pieces().items()})
            whole = optimizer.gather()
            if world.is_first:
                worst = differences(whole, load_file(root / f"{file}.safetensors"))
                # Rounding alone. Muon enlarges it where a gradient is nearly 0: with 24 seeds the
                # weights differ by 1e-6 at the median and 2.3e-5 at most, by torch's norms too.
                assert worst["exp_avg"] < 1e-6, worst
                assert worst["weight"] < 3e-5, worst
                assert max(worst.values()) < 1e-3, worst
                for name, weight in model.state_dict().items():
                    assert torch.equal(weight.cpu(), whole[f"weight/{name}"]), name
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def save_two(world: World, root: Path, precision: str) -> None:
    """Two ranks: save after STEPS, go on to the bit with what was saved."""
    model = make_model(precision)
    optimizer = Optimizer(model, RATES, precision=precision, world=world)
    train(optimizer, model, world, range(STEPS))
    directory = root / precision / "step-0000003"
    directory.mkdir(parents=True, exist_ok=True)
    write_pieces(directory, world.rank, optimizer.pieces())
    whole = optimizer.gather()
    if world.is_first:
        save_file(whole, root / f"{precision}-whole.safetensors")
        facts = CheckpointFacts(step=STEPS, total=STEPS, world_size=2, seconds=0.0, state={})
        commit(directory, facts)
    dist.barrier()
    train(optimizer, model, world, range(STEPS, STEPS + 2))
    again = make_model(precision)
    second = Optimizer(again, RATES, precision=precision, world=world)
    second.load(read_saved(root, precision))
    train(second, again, world, range(STEPS, STEPS + 2))
    first, resumed = optimizer.pieces(), second.pieces()
    assert all(torch.equal(first[key], resumed[key]) for key in first | resumed)


def read_saved(root: Path, precision: str) -> Callable[[str], Tensor]:
    """Return the function that reads a tensor of what two ranks saved."""
    found = find_checkpoint(root / precision, warn=pytest.fail)
    assert found is not None
    return found.read


def check_matrices(world: World) -> None:
    """Two ranks add the gradients of matrices to their sums, which are then those of one rank."""
    found: list[dict[str, Tensor]] = []
    with (
        mock.patch.multiple(matrix_gradient, DEVICES={"cpu"}, MIN_SIDE=16),
        mock.patch.object(
            matrix_gradient, "add_in_torch", wraps=matrix_gradient.add_in_torch
        ) as add,
    ):
        for one in (world, ALONE):
            model = make_model("bf16")
            optimizer = Optimizer(model, RATES, precision="bf16", world=one)
            train(optimizer, model, one, range(1))
            found.append(optimizer.gather())
    # Each rank half of the rows, and then all: 6 matrices of 3 layers.
    assert add.call_count == (ROWS // 2 + ROWS) * 6 * 3
    if world.is_first:
        worst = differences(*found)
        assert worst["momentum"] < 1e-6, worst


def check_loading(world: World, root: Path, precision: str) -> None:
    """Any number of ranks: what two saved is there to the bit, and trains on as one would."""
    expected = load_file(root / f"{precision}-whole.safetensors")
    model = make_model(precision)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)  # nothing of a fresh model may remain
    optimizer = Optimizer(model, RATES, precision=precision, world=world)
    optimizer.load(read_saved(root, precision))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"weight/{name}"].to(parameter.dtype)), name
    whole = optimizer.gather()
    assert all(torch.equal(whole[key], expected[key]) for key in (expected if whole else {}))
    assert bool(whole) == world.is_first
    train(optimizer, model, world, range(STEPS, STEPS + 2))
    whole = optimizer.gather()
    if world.is_first and precision == "fp32":
        worst = differences(whole, load_file(root / "later.safetensors"))
        assert max(worst.values()) < 1e-4, worst


def run(job: Job) -> dict[str, Any]:
    """The entry of a job of four processes: what each does."""
    rank, root = int(os.environ["RANK"]), job.directory
    torch.set_num_threads(1)
    for size in (2, 4, 3):
        if rank >= size:
            continue
        store = dist.FileStore(str(root / f"store-{size}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        control = dist.new_group()
        assert isinstance(control, dist.ProcessGroup)
        world = World(rank=rank, local_rank=rank, size=size, control=control)
        check_questions(world)
        check_gathering(world)
        if size == 2:
            check_training(world, root)
            with adding_lookups():
                check_training(world, root)
            check_matrices(world)
            check_overlap(world)
        for precision in ("fp32", "bf16"):
            if size == 2:
                save_two(world, root, precision)
            else:
                check_loading(world, root, precision)
        dist.destroy_process_group()
    return {}


def run_gpu_rank(rank: int, root: Path, port: int) -> None:
    """What each process does on a GPU of its own."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    world = open_world(device)
    check_questions(world)
    check_gathering(world)
    check_training(world, root, device)
