"""The QK kernel: in Triton's interpreter, on a GPU, and refused where it cannot run."""

import pytest
import torch

from bench.our_train import make_job
from nanochat_core.errors import ConfigError
from nanochat_core.model import attention
from nanochat_core.train import pretrain
from tests.support.nanochat_core.interpreted import check_interpreted, needs_triton

pytestmark = pytest.mark.torch

CASE = {
    **{"depth": 1, "precision": "fp32", "sequence_len": 16, "vocab_size": 265, "threads": 1},
    **{"rows": 1, "accumulate": 1, "device": "cpu", "attention": "auto", "compile": False},
}


@needs_triton
def test_the_interpreted_kernel_computes_what_torch_computes():
    check_interpreted("model/interpreted_qk_kernel.py")


def test_without_a_gpu_training_with_it_ends_with_the_reason(tmp_path):
    job = make_job(CASE, tmp_path, num_steps=1, qk_kernel=True)
    with pytest.raises(
        ConfigError, match="the QK kernel cannot run here: it needs a GPU"
    ) as raised:
        pretrain.run(job)
    assert raised.value.hint == "--place qk_kernel=false"
    assert attention._qk_kernel is None


@pytest.mark.gpu
def test_a_gpu_computes_what_torch_computes():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    attention.choose_qk_kernel(True, torch.device("cuda"), 128)
    try:
        assert attention._qk_kernel is not None
    finally:
        attention.choose_qk_kernel(False, torch.device("cuda"), 128)
