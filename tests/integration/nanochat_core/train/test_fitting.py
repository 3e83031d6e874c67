"""Out of memory in a step: half the device batch, the same step, or a person is told what fits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from nanochat_core.errors import StageError
from nanochat_core.job import Job
from nanochat_core.model.gpt import GPT
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import World
from nanochat_core.runtime.progress import last_by_step, read_events
from nanochat_core.train import rl
from nanochat_core.train.loop import sanity_checks
from nanochat_core.train.loop.oom import is_out_of_memory

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
    rows: int, monkeypatch: pytest.MonkeyPatch, error: Callable[[], RuntimeError], *, after: int = 0
) -> None:
    """Training passes of more than `rows` rows find no memory, once `after` were done."""
    real, passes = GPT.summed_loss, iter(range(10**6))

    def summed_loss(self: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and len(tokens) > rows and next(passes) >= after:
            raise error()
        return real(self, tokens, targets)

    monkeypatch.setattr(GPT, "summed_loss", summed_loss)


def test_torchs_own_words_are_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**43, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("kind", ERRORS)
def test_the_step_is_done_again_with_half_the_rows_and_its_loss_is_the_same(
    kind: str,
    data: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resources = {"device_batch_size": 2}
    small = make_job("pretrain", tmp_path / "small", data, resources={"device_batch_size": 1})
    expected = run_stage(small)
    job = make_job("pretrain", tmp_path / "job", data, resources=resources)
    fail_above(1, monkeypatch, ERRORS[kind])
    metrics = run_stage(job)
    assert metrics["device_batch_size"] == 1
    assert metrics["val_bpb"] == expected["val_bpb"]
    told, wanted = (last_by_step(read_events(j.events), "step") for j in (job, small))
    assert [v["loss"] for v in told.values()] == [v["loss"] for v in wanted.values()]
    (message,) = [e["text"] for e in read_events(job.events) if e["kind"] == "message"]
    assert message.startswith("out of memory with 2 rows per device: continuing with 1.")


def test_a_step_that_is_done_again_asks_the_other_ranks_nothing_again(
    data: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of them may have got further than another: what they ask together they ask once."""
    asked: list[str] = []
    real = World.sum

    def counted(self: World, tensor: torch.Tensor) -> torch.Tensor:
        asked.append(calm)
        return real(self, tensor)

    monkeypatch.setattr(World, "sum", counted)
    for calm in ("calm", "retried"):
        job = make_job("pretrain", tmp_path / calm, data, resources={"device_batch_size": 2})
        if calm == "retried":
            fail_above(1, monkeypatch, ERRORS["gpu"], after=5)
        run_stage(job)
    assert asked.count("calm") == asked.count("retried")


@pytest.mark.parametrize(("given", "begins"), [(2, 1), (4, 4)])
def test_a_job_keeps_the_size_that_fitted_unless_it_is_given_another(
    given: int,
    begins: int,
    data: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_job("pretrain", tmp_path / "job", data, resources={"device_batch_size": 2})
    with monkeypatch.context() as patch:
        fail_above(1, patch, ERRORS["gpu"])
        run_stage(job)
    job = replace(job, resources=replace(job.resources, device_batch_size=given))
    assert run_stage(job)["device_batch_size"] == begins


def test_in_the_middle_of_a_step_what_was_added_before_is_forgotten(
    data: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = make_job("pretrain", tmp_path / "whole", data, resources={"device_batch_size": 2})
    expected = run_stage(whole)
    job = make_job("pretrain", tmp_path / "job", data, resources={"device_batch_size": 2})
    fail_above(1, monkeypatch, ERRORS["gpu"], after=5)  # two passes a step: in the third step
    metrics = run_stage(job)
    assert metrics["device_batch_size"] == 1
    assert metrics["val_bpb"] == pytest.approx(expected["val_bpb"], rel=1e-5)
    told, wanted = (last_by_step(read_events(j.events), "step") for j in (job, whole))
    assert [v["loss"] for v in told.values()] == pytest.approx(
        [v["loss"] for v in wanted.values()], rel=1e-5
    )


@pytest.mark.parametrize(
    ("size", "retry", "message", "hint"),
    [
        (4, False, "out of memory with 4 rows per device: CUDA out", "--device-batch-size 2"),
        (1, True, "out of memory with one row per device: CUDA out", "smaller --depth"),
    ],
)
def test_the_error_says_what_fits(
    size: int,
    retry: bool,
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
    with pytest.raises(StageError, match=f"^{message}") as caught:
        run_stage(job)
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


def no_room_to_weigh(
    rows: int, monkeypatch: pytest.MonkeyPatch, error: Callable[[], RuntimeError]
) -> list[int]:
    """Passes of RL that weigh more than `rows` answers find no memory; the rows of each pass."""
    real, tried, probes = GPT.token_losses, [], []
    probe = sanity_checks.fixed_text_loss

    def probe_loss(*given: Any, **options: Any) -> float:  # has room: it takes one row at a time
        probes.append(True)
        loss = probe(*given, **options)
        probes.clear()
        return loss

    def token_losses(self: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() and not probes:
            tried.append(len(tokens))
            if len(tokens) > rows:
                raise error()
        return real(self, tokens, targets)

    monkeypatch.setattr(GPT, "token_losses", token_losses)
    monkeypatch.setattr(sanity_checks, "fixed_text_loss", probe_loss)
    return tried


RL_SECTION = {"clip": 0.2, "updates_per_batch": 2, "kl_weight": 0.1, "num_steps": 2}


def test_answers_that_cannot_be_weighed_at_once_are_weighed_in_smaller_bites(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rl, "are_correct", lambda _, graded: [len(a) % 2 == 0 for _, a in graded])
    jobs = {
        size: make_job(
            "rl", tmp_path / str(size), models,
            section=RL_SECTION, resources={"device_batch_size": size},
        )
        for size in (1, 4)
    }  # fmt: skip
    expected = run_stage(jobs[1])
    tried = no_room_to_weigh(1, monkeypatch, ERRORS["gpu"])
    found = run_stage(jobs[4])
    assert found == {**expected, "device_batch_size": 1}
    assert tried[:2] == [4, 2]  # before any gradient: the whole run is that of one row
    assert set(tried[2:]) == {1}
    names = ("model.safetensors", "optimizer.safetensors")
    for name in names:
        assert (jobs[4].output / name).read_bytes() == (jobs[1].output / name).read_bytes()
    messages = [e["text"] for e in read_events(jobs[4].events) if e["kind"] == "message"]
    assert sum("continuing with" in text for text in messages) == 2


def test_answers_of_which_not_one_can_be_weighed_are_reported(
    models: dict[str, Path],
    make_job: MakeJob,
    run_stage: RunStage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rl, "are_correct", lambda _, graded: [len(a) % 2 == 0 for _, a in graded])
    job = make_job("rl", tmp_path, models, section=RL_SECTION)
    no_room_to_weigh(0, monkeypatch, ERRORS["gpu"])
    with pytest.raises(StageError, match=r"^out of memory with one row per device: CUDA out"):
        run_stage(job)


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
