"""Compiled training steps against eager ones, and against themselves after a stop."""

import shutil

import pytest

from infra.launch.torchrun import StageInterrupted, run_job

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here"),
    pytest.mark.filterwarnings("ignore:Dynamo detected", "ignore:.*deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]


def test_a_stage_compiled_by_block_resumes_to_the_same_bytes(bench):
    resources = {"compile": "blocks", "determinism": "strict"}
    whole, parts = (bench.job("pretrain", name, **resources) for name in ("whole", "parts"))

    def run(job, steps=None):
        run_job(job, processes=1, on_event=lambda event: None, steps=steps)

    run(whole)
    with pytest.raises(StageInterrupted):
        run(parts, steps=3)
    run(parts)  # in a process that sees no evaluation before its first step
    assert bench.has_resumed(parts)
    assert bench.losses(parts) == bench.losses(whole)
    assert bench.files(parts.output) == bench.files(whole.output)
