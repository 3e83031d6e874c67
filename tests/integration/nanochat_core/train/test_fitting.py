"""A lack of memory ends a training job with an error that says what may fit."""

from dataclasses import replace

import pytest
import torch

from nanochat_core.errors import OutOfMemory, StageError
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.oom import is_out_of_memory, oom_explained

pytestmark = pytest.mark.torch
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 8796093022208 bytes. Error code 12 (Cannot allocate memory)"
)
OTHER = RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def fail(monkeypatch, owner, name, error):
    """Let what trains raise an error: of a model only where gradients are wanted."""
    real = getattr(owner, name)

    def failing(self, *given, **named):
        if owner is Optimizer or torch.is_grad_enabled():
            raise error
        return real(self, *given, **named)

    monkeypatch.setattr(owner, name, failing)


def test_torchs_own_words_are_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**43, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(GPU)
    assert not is_out_of_memory(OTHER)


@pytest.mark.parametrize(
    ("owner", "name", "size", "retry", "message", "hint"),
    [
        (GPT, "summed_loss", 4, True, "4 rows per device: CUDA out", "--device-batch-size 2"),
        (GPT, "summed_loss", 4, False, "4 rows per device: CUDA out", "--device-batch-size 2"),
        (GPT, "summed_loss", 1, True, "one row per device: CUDA out", "smaller --depth"),
        (Optimizer, "step", 4, True, "4 rows per device", "--device-batch-size 2"),
    ],
)
def test_the_error_says_what_fits(bench, owner, name, size, retry, message, hint, monkeypatch):
    job = bench.job("pretrain", device_batch_size=size, retry_smaller_batch=retry)
    fail(monkeypatch, owner, name, GPU)
    with pytest.raises(StageError, match=f"^out of memory with {message}") as caught:
        bench.run(job)
    assert type(caught.value) is (OutOfMemory if retry and size > 1 else StageError)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GPU, "out of memory with 4 rows per device: CUDA out"),
        (CPU, "the host is out of memory: .*DefaultCPUAllocator"),
    ],
)
def test_a_gpus_job_that_finds_no_memory_of_the_host_is_not_retried_with_fewer_rows(
    error, message, bench
):
    resources = replace(bench.job("pretrain").resources, device="cuda", retry_smaller_batch=True)
    with pytest.raises(StageError, match=f"^{message}") as caught, oom_explained(resources):
        raise error
    assert isinstance(caught.value, OutOfMemory) == (error is GPU)


def test_another_error_is_not_taken_for_a_lack_of_memory(bench, monkeypatch):
    fail(monkeypatch, GPT, "summed_loss", OTHER)
    with pytest.raises(RuntimeError, match="shapes cannot"):
        bench.done("pretrain")
