"""Every training stage repeats itself to the last bit."""

import pytest

from flows.stages import stage_named
from tests.integration.nanochat_core.train.test_proof import CLEARER, copy_repository, prove_edit

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["midtrain", "sft", "rl"])
def test_every_training_stage_repeats_itself_to_the_bit(bench, tmp_path, name):
    stage = stage_named(name)
    longer = {"num_steps": 400} if name == "rl" else {"num_epochs": 400}
    job = bench.job(name, section=longer)
    proof = prove_edit(copy_repository(tmp_path), stage, bench.config, job, CLEARER)
    assert proof.compared >= 3 + 2  # a value of each step; weights and optimizer
