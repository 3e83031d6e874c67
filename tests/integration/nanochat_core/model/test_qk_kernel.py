"""Triton's kernels of training: in its interpreter, and refused where they cannot run."""

import pytest
import torch

from bench.our_train import make_job
from nanochat_core.errors import ConfigError
from nanochat_core.model import attention
from nanochat_core.model.matrices import gradient as matrix_gradient
from nanochat_core.train import pretrain
from tests.support.nanochat_core.interpreted import check_interpreted, needs_triton

pytestmark = pytest.mark.torch

CASE = {
    **{"depth": 1, "precision": "fp32", "sequence_len": 16, "vocab_size": 265, "threads": 1},
    **{"rows": 1, "accumulate": 1, "device": "cpu", "attention": "auto", "compile": False},
}


@needs_triton
@pytest.mark.parametrize("file", ["qk_kernel", "gradient_kernels"])
def test_the_interpreted_kernels_compute_what_torch_computes(file):
    check_interpreted(f"model/interpreted_{file}.py")


@pytest.mark.parametrize("kernel", ["QK", "weight"])
def test_without_a_gpu_training_with_it_ends_with_the_reason(tmp_path, kernel):
    setting = f"{kernel.lower()}_kernel"
    job = make_job(CASE, tmp_path, num_steps=1, **{setting: True})
    reason = f"the {kernel} kernel cannot run here: it needs a GPU"
    with pytest.raises(ConfigError, match=reason) as raised:
        pretrain.run(job)
    assert raised.value.hint == f"--place {setting}=false"
    assert attention._qk_kernel is None
    assert not matrix_gradient.DEVICES


@pytest.mark.gpu
def test_a_gpu_computes_what_torch_computes():
    attention.choose_qk_kernel(True, torch.device("cuda"), 128)
    try:
        assert attention._qk_kernel is not None
    finally:
        attention.choose_qk_kernel(False, torch.device("cuda"), 128)
