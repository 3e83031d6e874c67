"""Steps whose state is on the device, in torch, as graphs and as kernels, sample what others do."""

import json
import random
from functools import partial

import pytest
import torch

from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runners import choose
from nanochat_core.engine.runners.choose import choose_runner, open_runner
from nanochat_core.engine.runners.cuda_graphs import bucket_of
from nanochat_core.engine.runners.device_runner import MAX_CANDIDATES, DeviceRunner
from nanochat_core.engine.runners.prefill_attention import varlen
from nanochat_core.engine.sampling import row_key
from nanochat_core.errors import ConfigError
from tests.support.nanochat_core.engine.torch_slots import (
    LONGEST,
    begin,
    give_pages,
    open_small,
    prompts_of,
    read_in_pieces,
)
from tests.support.nanochat_core.interpreted import check_interpreted, needs_triton, run_python
from tests.support.nanochat_core.random_gpt import capacity_of

pytestmark = pytest.mark.torch

SLOTS = 5
STOPS = tuple(range(0, 256, 16))  # so that answers stop now and then
ALL_PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_k=5, temperature=0.7),
    SamplingParams(top_k=40, top_p=0.9),
    SamplingParams(top_p=0.8),
]


def answers(kind, model, all_params):
    """Ragged prompts, scattered pages, calls of several steps, limits that are met on the way."""
    runner = kind(
        model, dtype=torch.float32, capacity=capacity_of(model, num_slots=SLOTS), stop_tokens=STOPS
    )
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 9, 17, 30, 3)]
    output = [begin(runner, prompts, all_params, rng)]
    limits = [LONGEST, 14, LONGEST, 33, LONGEST]
    order = [3, 0, 4, 1, 2]
    output.append(runner.decode(order, [limits[s] for s in order], 3)())
    runner.release(4)
    output.append(runner.decode([0, 4, 2], [limits[s] for s in (0, 4, 2)], 5)())
    output.append(runner.decode(order, [limits[s] for s in order], 12)())
    return output


def test_rows_are_filled_up_to_powers_of_two():
    assert [bucket_of(n, 12) for n in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]


def test_only_what_needs_the_vocabulary_takes_the_slower_step(make_model):
    model = make_model()
    capacity = capacity_of(model, num_slots=1, num_pages=2)
    runner = DeviceRunner(model, dtype=torch.float32, capacity=capacity, stop_tokens=())

    def needs(params):
        runner.start(0, params, key=row_key(0, 0), num_log_probs=None)
        return runner.kind_of([0], [LONGEST], num_rows=1).all_candidates

    assert not needs(SamplingParams())
    assert not needs(SamplingParams(top_k=50, top_p=0.9))
    assert not needs(SamplingParams(temperature=0.0, top_p=0.5))
    assert needs(SamplingParams(top_p=0.9))
    assert needs(SamplingParams(top_k=MAX_CANDIDATES + 1))


WAYS = [{"graphs": True}, {"kernels": True}, {"graphs": True, "kernels": True}]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("same", [None, *ALL_PARAMS], ids=str)
def test_captured_steps_and_kernels_sample_what_torchs_eager_steps_sample(make_model, same, way):
    model = make_model(windows=(6, 64), num_kv_heads=1).to("cuda")
    all_params = ALL_PARAMS if same is None else [same] * SLOTS
    assert answers(partial(DeviceRunner, **way), model, all_params) == answers(
        DeviceRunner, model, all_params
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("count", [1, 2, 12, 40])  # alone; 8, 16 and 32 rows in a program
@torch.inference_mode()
def test_kernels_compute_the_logits_of_torch_for_any_number_of_rows(
    make_model, count, dtype, error
):
    model = make_model(windows=(6, 64), num_kv_heads=1).to("cuda")
    prompts, logits = prompts_of(count, seed=6), []
    for kernels in (True, False):
        runner = DeviceRunner(
            model,
            dtype=dtype,
            capacity=capacity_of(model, num_slots=count),
            stop_tokens=STOPS,
            kernels=kernels,
        )
        begin(runner, prompts, ALL_PARAMS[:1] * count, random.Random(4))
        rows = torch.arange(count, device="cuda")
        runner.state.token[rows] = rows + 1
        runner.state.stopped[rows], runner.state.limit[rows] = False, LONGEST
        kind = runner.kind_of(range(count), [LONGEST] * count, num_rows=count)
        step = (
            partial(runner._step_logits, kind) if runner.kernels is None else runner.kernels.forward
        )
        logits.append(step(rows))
    assert (logits[0] - logits[1]).abs().max() < error * logits[1].abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_one_call_of_attention_a_layer_gives_the_logits_of_one_a_chunk(make_model, num_kv_heads):
    model = make_model(windows=(6, 64), num_kv_heads=num_kv_heads).to("cuda")
    prompts = prompts_of(4, seed=5)
    logits = []
    for together in (True, False):
        runner = open_small(model, dtype=torch.bfloat16)
        if torch.cuda.get_device_capability() >= (8, 0):
            assert runner._varlen is varlen
        if not together:
            runner._varlen = None
        rng = random.Random(4)
        for slot in range(4):
            give_pages(runner, slot, rng=rng)
        logits.append(read_in_pieces(runner, prompts, rng))
    error = (logits[0] - logits[1]).abs().max() / logits[1].abs().max()
    assert error < 0.03


@pytest.mark.gpu
def test_a_kind_of_step_is_captured_once(make_model):
    model = make_model().to("cuda")
    runner = DeviceRunner(
        model,
        graphs=True,
        dtype=torch.float32,
        capacity=capacity_of(model, num_slots=4, num_pages=40),
        stop_tokens=(),
    )
    for slot in range(4):
        runner.start(slot, SamplingParams(), key=row_key(0, slot), num_log_probs=None)
    captured = dict(runner.graphs.captured)
    assert {kind.num_rows for kind in captured} == {1, 2, 4}
    for count in (1, 2, 3, 4, 2, 1):
        runner.decode(range(count), [LONGEST] * count, 2)()
    assert runner.graphs.captured == captured


# The decode kernels, in Triton's interpreter and in its compiler. Neither needs a GPU.


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
