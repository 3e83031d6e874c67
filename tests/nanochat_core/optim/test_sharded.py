"""The optimizer divided among ranks: the same training, and a state that any number can take over.

Four processes are started once, join groups of two, four and three in turn, and check themselves.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanochat_core.runtime.distributed import ALONE
from tests.nanochat_core.optim.ranks import (
    CLIPPED,
    RATES,
    STEPS,
    check_loading,
    run_rank,
    trained_alone,
)

pytestmark = pytest.mark.torch


def test_ranks_train_as_one_and_any_number_takes_over_what_two_saved(tmp_path: Path) -> None:
    save_file(trained_alone(RATES, STEPS), tmp_path / "plain.safetensors")
    save_file(trained_alone(CLIPPED, STEPS), tmp_path / "clipped.safetensors")
    save_file(trained_alone(RATES, STEPS + 2), tmp_path / "later.safetensors")
    torch.multiprocessing.spawn(run_rank, args=(tmp_path,), nprocs=4)
    check_loading(ALONE, tmp_path, "fp32")
    check_loading(ALONE, tmp_path, "bf16")
