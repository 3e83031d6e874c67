"""Compiled training steps against eager ones, and against themselves after a stop."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.launch.torchrun import StageInterrupted, run_job
from nanochat_core.job import Compile, Job, digests_of
from nanochat_core.runtime.progress import last_by_step, read_events

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here"),
    pytest.mark.filterwarnings("ignore:Dynamo detected", "ignore:.*deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]


@pytest.mark.parametrize("way", [True, "blocks"], ids=["whole", "by block"])
def test_compiled_passes_give_the_losses_of_eager_ones(
    data: dict[str, Path],
    make_job: Callable[..., Job],
    run_stage: Callable[[Job], dict[str, object]],
    tmp_path: Path,
    way: Compile,
) -> None:
    """Takes about a minute on a CPU, nearly all of it in the compiler."""
    losses: list[list[float]] = []
    for compiled in (False, way):
        job = make_job("pretrain", tmp_path / str(compiled), data, resources={"compile": compiled})
        run_stage(job)
        losses.append(losses_of(job))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != losses[1]  # else nothing was compiled


def test_a_stage_compiled_by_block_resumes_to_the_same_bytes(
    data: dict[str, Path], make_job: Callable[..., Job], tmp_path: Path
) -> None:
    resources = {"compile": "blocks", "determinism": "strict"}
    whole, parts = (
        make_job("pretrain", tmp_path / name, data, resources=resources)
        for name in ("whole", "parts")
    )

    def run(job: Job, steps: int | None = None) -> None:
        run_job(job, processes=1, on_event=lambda event: None, steps=steps)

    run(whole)
    with pytest.raises(StageInterrupted):
        run(parts, steps=3)
    run(parts)  # in a process that sees no evaluation before its first step
    assert any(event["kind"] == "start" and event["resumed"] for event in read_events(parts.events))
    assert losses_of(parts) == losses_of(whole)
    assert digests_of(parts.output) == digests_of(whole.output)


def losses_of(job: Job) -> list[float]:
    """Return the loss of each step."""
    steps = last_by_step(read_events(job.events), "step")
    return [values["loss"] for values in steps.values()]
