"""The optimizer on GPUs: no waiting for the device, and several GPUs as one. Needs GPUs."""

import socket

import pytest
import torch
from safetensors.torch import save_file

from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from tests.support.nanochat_core.optim.ranks import (
    CLIPPED,
    RATES,
    STEPS,
    differences,
    make_model,
    run_gpu_rank,
    train,
    trained_alone,
)

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.fixture
def device():
    return torch.device("cuda", 0)


@pytest.mark.parametrize("rates", [RATES, CLIPPED], ids=["plain", "clipped"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_never_waits_for_the_device(precision, rates, device):
    model = make_model(precision, device)
    optimizer = Optimizer(model, rates, precision=precision, world=ALONE)
    train(optimizer, model, ALONE, range(2))
    tokens = torch.randint(60, (2, 17), device=device)
    # Kernels are compiled for the first pass of a shape, and compiling may wait for the device.
    optimizer.backward(model.token_losses(tokens[:, :-1], tokens[:, 1:]).sum(), last=True)
    optimizer.start_reduce_scatter()
    optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.1)
    loss = model.token_losses(tokens[:, :-1], tokens[:, 1:]).sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.backward(loss, last=True)
        optimizer.start_reduce_scatter()
        optimizer.step(lr_multiplier=1.0, momentum=0.9, weight_decay=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_trains_as_the_cpu_does(device):
    torch.backends.cuda.matmul.allow_tf32 = False
    worst = differences(trained_alone(RATES, STEPS, device), trained_alone(RATES, STEPS))
    assert worst["weight"] < 1e-4, worst


def test_two_gpus_train_as_one(tmp_path, device):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    save_file(trained_alone(RATES, STEPS, device), tmp_path / "plain.safetensors")
    save_file(trained_alone(CLIPPED, STEPS, device), tmp_path / "clipped.safetensors")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run_gpu_rank, args=(tmp_path, port), nprocs=2)
