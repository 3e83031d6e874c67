"""Which errors are worth another attempt, and after how long."""

import pytest

from flows.building.retry import (
    RetryBudget,
    TransientStageError,
    is_retryable,
)
from flows.leases.held_lease import LeaseLost
from infra.launch.torchrun import JobFailed, StageInterrupted
from infra.retry import FIRST_PAUSE
from infra.storage.base import StoreUnavailable
from nanochat_core.errors import ArtifactError, ConfigError, DataError, StageError, StoreError


def failed(message: str, cause: str | None) -> JobFailed:
    return JobFailed(message, hint=None, log_tail="", cause=cause)


OF_THE_MACHINE = [
    failed("pretrain ended without a result: killed by SIGKILL", None),
    failed("pretrain hangs", None),
    failed("rank 1: DistBackendError: NCCL error", "DistBackendError"),
    failed("rank 1: RuntimeError: [gloo/tcp/pair.cc] Connection closed by peer", "RuntimeError"),
    failed("rank 1: RuntimeError: CUDA error: unspecified launch failure", "RuntimeError"),
    StageInterrupted("pretrain was interrupted"),
    LeaseLost("pretrain/1 lost its lease"),
    StoreUnavailable("s3://b cannot be reached"),
    TransientStageError("pretrain/1 was lost"),
]
FOR_A_PERSON = [
    failed("rank 0: ValueError: broken", "ValueError"),
    failed("rank 0: RuntimeError: size mismatch, got 3 and 4", "RuntimeError"),
    failed("rank 0: OutOfMemoryError: CUDA out of memory", "OutOfMemoryError"),
    ConfigError("width 3"),
    StoreError("store s3://b: there is no bucket"),
    DataError("no text"),
    StageError("pretrain: the disk is full"),
    ArtifactError("pretrain/1 is damaged"),
    ValueError("ours"),
    None,
]


@pytest.mark.parametrize("error", [*OF_THE_MACHINE, *FOR_A_PERSON], ids=str)
def test_only_what_the_machine_did_is_retried(error):
    assert is_retryable(error) == (error in OF_THE_MACHINE)


def lose(attempts: RetryBudget, *, at: int) -> bool:
    attempts.note({"kind": "start", "step": 0})
    attempts.note({"kind": "step", "step": at})
    return attempts.lose()


def test_a_stage_that_comes_further_each_time_is_tried_again_for_ever():
    attempts = RetryBudget(2)
    assert attempts.pause == 0
    assert all(lose(attempts, at=10 * number) for number in range(1, 100))
    assert attempts.pause == FIRST_PAUSE  # each was like the first


def test_a_stage_that_is_lost_at_the_same_step_is_not():
    attempts = RetryBudget(2)
    assert [lose(attempts, at=7) for _ in range(3)] == [True, True, False]
    assert not lose(attempts, at=6)


def test_without_retries_the_first_loss_is_the_last():
    assert not lose(RetryBudget(0), at=5)
