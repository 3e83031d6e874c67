"""What holds a GPU reaches no network: stages from pretraining on run with the plug pulled."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanochat_core.job import Job
from tests.support.nanochat_core.network import NetworkUsed, pull_the_plug

pytestmark = pytest.mark.torch

GPU_STAGES = ("pretrain", "base_eval", "midtrain", "sft", "rl", "chat_eval_sft")


@pytest.mark.parametrize("stage", GPU_STAGES)
def test_the_stage_needs_no_network(
    stage: str,
    models: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = make_job(stage, tmp_path / stage, models)
    pull_the_plug(monkeypatch)
    with pytest.raises(NetworkUsed):
        socket.create_connection(("127.0.0.1", 9))
    run_stage(job)
    assert any(job.output.iterdir())
