"""Tests of the decode kernels in Triton's interpreter, on a CPU.

The interpreter has to be chosen before the kernels are imported: test_device_runner.py runs this
file in processes of its own, with TRITON_INTERPRET=1. Beside the kernels stands the torch runner.
"""

import importlib
import random

import pytest
import torch
import triton.language as tl  # pyright: ignore[reportMissingImports]

from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runners import decode_kernels
from nanochat_core.engine.runners.decode_kernels import Target, run
from nanochat_core.engine.runners.device_runner import DeviceRunner
from nanochat_core.engine.sampling import SamplingRows, sample_rows
from nanochat_core.model.gpt import GPT
from tests.support.nanochat_core.engine.torch_slots import begin
from tests.support.nanochat_core.random_gpt import capacity_of, random_gpt

# Of numpy, in masked lanes.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

PAGE, LONGEST, SLOTS = 8, 64, 4
GREEDY = SamplingParams(temperature=0.0)
PLAIN = {"residual_scalars": False, "value_embeds": False, "smear": False, "backout": False}


@pytest.fixture(autouse=True)
def _products_of_bf16(monkeypatch):
    """The interpreter multiplies the bits of bf16 numbers, as if they were integers."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    plain = builder.create_dot

    def create_dot(self, a, b, *rest):
        bf16 = self.get_bf16_ty()
        a, b = (self.cast_impl(x, tl.float32) if x.dtype == bf16 else x for x in (a, b))
        return plain(self, a, b, *rest)

    monkeypatch.setattr(builder, "create_dot", create_dot)


def make_random(seed: int = 0, windows: tuple[int, ...] = (6, 64), **changes) -> GPT:
    """A model of two layers, with weights so large that every part matters."""
    return random_gpt(*windows, seed=seed, **{"sequence_len": 64, **changes})


def open_runner(
    model: GPT, all_params: list[SamplingParams], *, kernels: bool, dtype=torch.float32
) -> DeviceRunner:
    """A runner whose slots have read prompts of different lengths, on scattered pages."""
    runner = DeviceRunner(
        model,
        dtype=dtype,
        capacity=capacity_of(model, num_slots=SLOTS, page_size=PAGE),
        stop_tokens=range(0, 256, 16),
        kernels=kernels,
    )
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 11, 38, 18)]
    begin(runner, prompts, all_params, rng)
    runner.state.stopped[:SLOTS] = False
    runner.state.limit[:SLOTS] = LONGEST
    return runner


@pytest.mark.parametrize(
    ("changes", "dtype", "error"),
    [
        ({}, torch.float32, 1e-5),
        ({"num_kv_heads": 1, "windows": (0, 20, 6)}, torch.float32, 1e-5),
        (PLAIN, torch.float32, 1e-5),
        # The interpreter cuts bf16 off where a GPU rounds, and torch's activations are fp32 here.
        ({}, torch.bfloat16, 0.03),
    ],
    ids=["all parts", "shared keys", "no parts", "bf16"],
)
# All slots at once, the spare one among them; one after the other; more than a program's rows.
# Keys of a program from two pages; from one.
@pytest.mark.parametrize(
    "way", [(4, 32, 16), (1, 32, 8), (4, 2, 16)], ids=["together", "alone", "in blocks"]
)
@torch.inference_mode()
def test_logits_keys_and_values_are_those_of_torch(changes, dtype, error, way, monkeypatch):
    at_once, max_rows, keys = way
    target = Target(num_multiprocessors=2, keys=keys)
    monkeypatch.setattr(Target, "of", lambda device: target)
    monkeypatch.setattr(decode_kernels, "MIN_ROWS", 2)
    monkeypatch.setattr(decode_kernels, "MAX_ROWS", max_rows)
    model = make_random(**changes)
    ours, torchs = (
        open_runner(model, [GREEDY] * SLOTS, kernels=kernels, dtype=dtype)
        for kernels in (True, False)
    )
    for runner in (ours, torchs):
        runner.state.stopped[1] = True  # computes nothing, writes nothing
        runner.state.token[:SLOTS] = torch.tensor([7, 8, 9, 200])
    before = [(pool.keys.clone(), pool.values.clone()) for pool in ours.pools]
    slots = [2, SLOTS, 0, 1]  # the spare one among them
    rows = torch.tensor(slots)
    found = torch.cat([ours.kernels.forward(some).clone() for some in rows.split(at_once)])
    kind = torchs.kind_of(range(SLOTS), [LONGEST] * SLOTS, num_rows=len(slots))
    expected = torchs._step_logits(kind, rows)
    goes = [0, 2]
    scale = expected[goes].abs().max()
    assert (found[goes] - expected[goes]).abs().max() < error * scale
    for pool, other, (keys, values) in zip(ours.pools, torchs.pools, before, strict=True):
        for mine, theirs, old in (
            (pool.keys, other.keys, keys),
            (pool.values, other.values, values),
        ):
            assert (mine[:, 1:] - theirs[:, 1:]).abs().max() < error * theirs.abs().max()
            # Two slots have written, one place each.
            assert (mine != old).flatten(3).any(-1).sum(dim=(1, 2)).eq(2).all()
    assert not ours.kernels.arrived.any()


@torch.inference_mode()
def test_steps_sample_stop_and_advance_as_torchs():
    all_params = [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_k=5, temperature=0.7),
        SamplingParams(top_k=40, top_p=0.8),
    ]
    model = make_random()
    ours, torchs = (open_runner(model, all_params, kernels=k) for k in (True, False))
    limits = [LONGEST, 13, LONGEST, LONGEST]
    tokens = []
    for slots, steps in (([3, 0, 1, 2], 1), ([3, 0, 1, 2], 1), ([2, 0], 2)):
        of = [limits[slot] for slot in slots]
        tokens.append(ours.decode(slots, of, steps)().tokens)
        assert tokens[-1] == torchs.decode(slots, of, steps)().tokens
        for name in ("length", "prev_token", "token", "stopped"):
            assert torch.equal(getattr(ours.state, name), getattr(torchs.state, name)), name
    assert tokens[0][0][2] >= 0
    assert tokens[1][0][2] == -1  # at its limit
    assert sum(token >= 0 for columns in tokens for row in columns for token in row) > 6


@torch.inference_mode()
def test_a_step_that_torch_samples_continues_from_the_kernels_logits():
    all_params = [SamplingParams(top_p=0.9), GREEDY, GREEDY, GREEDY]
    model = make_random()
    ours, torchs = (open_runner(model, all_params, kernels=k) for k in (True, False))
    calls = [runner.decode([0, 1], [LONGEST] * 2, 2)() for runner in (ours, torchs)]
    assert calls[0] == calls[1]


@pytest.mark.parametrize("vocab", [265, 5000])
@torch.inference_mode()
def test_tokens_of_given_logits_are_those_that_torch_samples(vocab):
    all_params = [
        SamplingParams(top_k=256, temperature=1.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_k=3),
        SamplingParams(top_k=50, top_p=0.5, temperature=1.2),
    ]
    runner = open_runner(make_random(vocab_size=vocab), all_params, kernels=True)
    kernels, state, rows = runner.kernels, runner.state, torch.arange(SLOTS)
    generator = torch.Generator().manual_seed(1)
    found, expected = torch.zeros(2, SLOTS, dtype=torch.int64)
    for _ in range(3):
        state.stopped[:SLOTS] = False
        logits = torch.randn(SLOTS, vocab, generator=generator) * 3
        kernels.position[:SLOTS] = state.length[:SLOTS].int()
        expected = sample_rows(
            logits,
            state.key[rows],
            state.length[rows] + 1,
            SamplingRows(*(column[rows] for column in state.params)),
            num_candidates=256,
        )
        run([kernels.sample_launch(rows, logits, found)])
        assert found.tolist() == expected.tolist()


@torch.inference_mode()
def test_of_equal_logits_the_lowest_ids_compete_first():
    all_params = [SamplingParams(top_k=k, temperature=t) for k, t in ((3, 1.0), (256, 1.0))]
    runner = open_runner(make_random(vocab_size=600), [*all_params, GREEDY, GREEDY], kernels=True)
    kernels, rows = runner.kernels, torch.arange(SLOTS)
    kernels.position[:SLOTS] = runner.state.length[:SLOTS].int()
    logits = torch.ones(SLOTS, 600)  # more equals than can be ranked
    logits[0, 500] = 2.0
    found = torch.zeros(SLOTS, dtype=torch.int64)
    run([kernels.sample_launch(rows, logits, found)])
    assert int(found[0]) in (500, 0, 1)
    assert int(found[1]) < 256
    assert found[2:].tolist() == [0, 0]
