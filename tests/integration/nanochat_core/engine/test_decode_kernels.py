"""The decode kernels, in Triton's interpreter and in its compiler. Neither needs a GPU."""

import json

import pytest
import torch

from nanochat_core.engine.runners import choose
from nanochat_core.engine.runners.choose import choose_runner, open_runner
from nanochat_core.errors import ConfigError
from tests.support.nanochat_core.interpreted import check_interpreted, needs_triton, run_python

pytestmark = pytest.mark.torch


@needs_triton
@pytest.mark.parametrize(
    "part",
    [
        "logits_keys_and_values",
        "steps_sample_stop_and_advance or a_step_that_torch_samples",
        "tokens_of_given_logits or of_equal_logits",
    ],
)
def test_the_interpreted_kernels_compute_what_torch_computes(part):
    check_interpreted("engine/interpreted_kernels.py", "-k", part)


@needs_triton
def test_every_kernel_compiles_for_sm_90_and_keeps_its_values_in_registers():
    ended = run_python("-m", "bench.gpu.decode_kernels", "--depth", "12", "--rows", "1", "32")
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    predicted = [row["seconds"] for row in rows if row["name"] == "decode estimate"]
    assert 0 < predicted[0] < predicted[2]  # of one row and of 32
    training = {row["kernel"]: row["spilled"] for row in rows if row["name"] == "training kernel"}
    assert training.keys() >= {"table sum_pieces", "table add_rows"}
    assert not any(training.values())
    rows = [row for row in rows if row["name"] == "decode kernel"]
    # Before the previous kernel has ended weights may be read, and what older kernels wrote, see
    # attention.py, and nothing written.
    early = {row["kernel"].partition(" ")[0] for row in rows if row["early_loads"]}
    assert early == {"qkv", "attend", "add", "up", "head"}
    assert not any(row["early_stores"] for row in rows)
    for row in rows:
        is_product = row["kernel"].startswith(("qkv", "add", "up", "head"))
        by_tensor_cores = (is_product and row["rows"] > 1) or row["kernel"].startswith("attend")
        assert (row["tensor"] > 0) == by_tensor_cores, row
    spilled = {row["kernel"]: row["spilled"] for row in rows}
    assert {name.partition(" ")[0] for name in spilled} == {
        *("embed", "qkv", "attend", "add", "up", "head", "sample")
    }
    assert set(spilled.values()) == {0}


def test_without_triton_the_next_runner_is_taken_and_its_absence_is_the_reason(
    make_model, monkeypatch
):
    monkeypatch.setitem(choose.RUNNERS, "cpu", ("triton", "torch"))
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    model = make_model()
    choice = choose_runner(model, num_slots=1)
    assert choice.runner == "torch"
    assert choice.reason == "not triton: the package triton is not installed"
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        open_runner(model, stop_tokens=[], num_slots=1, runner="triton")
    with pytest.raises(ConfigError, match="it has no int8"):
        choose_runner(model, num_slots=1, runner="triton", precision="int8")


@needs_triton
def test_what_the_kernels_cannot_compute_is_refused_with_the_reason(make_model, monkeypatch):
    from nanochat_core.engine.runners import decode_kernels

    device, config = torch.device("cpu"), make_model().config
    monkeypatch.setattr(torch.version, "cuda", None)
    assert decode_kernels.unable(config, device) == "torch is not built for CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert decode_kernels.unable(config, device) == "it needs compute capability 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert decode_kernels.unable(config, device) is None
    object.__setattr__(config, "width", 48)
    assert "24 channels" in (decode_kernels.unable(config, device) or "")
