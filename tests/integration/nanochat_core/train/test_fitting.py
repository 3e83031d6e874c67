"""A lack of memory ends a training job with an error that says what may fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from nanochat_core.errors import OutOfMemory, StageError
from nanochat_core.job import Job
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.oom import is_out_of_memory, oom_explained

pytestmark = pytest.mark.torch
MakeJob: TypeAlias = Callable[..., Job]
RunStage: TypeAlias = Callable[[Job], dict[str, Any]]

CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 8796093022208 bytes. Error code 12 (Cannot allocate memory)"
)
ERRORS = {
    "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(CPU_TEXT),
}


def fail_above(
    rows: int, monkeypatch: pytest.MonkeyPatch, error: Callable[[], RuntimeError]
) -> None:
    """Training passes of more than `rows` rows find no memory."""
    real = GPT.summed_loss

    def summed_loss(self: GPT, tokens: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and len(tokens) > rows:
            raise error()
        return real(self, tokens, *given)

    monkeypatch.setattr(GPT, "summed_loss", summed_loss)


def test_torchs_own_words_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**43, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize(
    ("size", "retry", "kind", "message", "hint"),
    [
        (4, True, OutOfMemory, "4 rows per device: CUDA out", "--device-batch-size 2"),
        (4, False, StageError, "4 rows per device: CUDA out", "--device-batch-size 2"),
        (1, True, StageError, "one row per device: CUDA out", "smaller --depth"),
    ],
)
def test_the_error_says_what_fits(
    size: int,
    retry: bool,
    kind: type[StageError],
    message: str,
    hint: str,
    data: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resources = {"device_batch_size": size, "retry_smaller_batch": retry}
    job = make_job("pretrain", tmp_path / "job", data, resources=resources)
    fail_above(0, monkeypatch, ERRORS["gpu"])
    with pytest.raises(StageError, match=f"^out of memory with {message}") as caught:
        run_stage(job)
    assert type(caught.value) is kind
    assert hint in str(caught.value.hint)


def test_a_lack_of_memory_outside_the_gradients_is_reported_too(
    data: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room(self: Optimizer, **numbers: float) -> None:
        raise ERRORS["gpu"]()

    job = make_job("pretrain", tmp_path / "job", data)
    monkeypatch.setattr(Optimizer, "step", no_room)
    with pytest.raises(StageError, match=r"^out of memory with 4 rows per device") as caught:
        run_stage(job)
    assert "--device-batch-size 2" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("gpu", "out of memory with 4 rows per device: CUDA out"),
        ("cpu", "the host is out of memory: .*DefaultCPUAllocator"),
    ],
)
def test_a_gpus_job_that_finds_no_memory_of_the_host_is_not_retried_with_fewer_rows(
    error: str, message: str, data: dict[str, Path], make_job: MakeJob, tmp_path: Path
) -> None:
    resources = make_job("pretrain", tmp_path / "job", data).resources
    with (
        pytest.raises(StageError, match=f"^{message}") as caught,
        oom_explained(replace(resources, device="cuda", retry_smaller_batch=True)),
    ):
        raise ERRORS[error]()
    assert isinstance(caught.value, OutOfMemory) == (error == "gpu")


def test_another_error_is_not_taken_for_a_lack_of_memory(
    data: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_job("pretrain", tmp_path / "job", data)
    fail_above(0, monkeypatch, lambda: RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot"):
        run_stage(job)
