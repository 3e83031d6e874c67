"""What the scheduler relies on, of every runner: one body, a column for each way to compute."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from nanochat_core.engine.native.build import AMX
from nanochat_core.engine.native.runner import NativeRunner
from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runners.device_runner import DeviceRunner
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.engine.sampling import row_key, sample
from nanochat_core.eras import ERAS, HEAD
from nanochat_core.runtime.hardware.cpp_library import processor_flags
from tests.support.nanochat_core.engine.native_models import (
    LENGTH,
    VOCAB,
    chunk,
    make_gpt,
    make_tokens,
    needs_kernels,
    read,
)
from tests.support.nanochat_core.engine.torch_slots import VarlenRunner, matrices_of
from tests.support.nanochat_core.random_gpt import capacity_of

needs_amx = pytest.mark.skipif(not processor_flags() >= AMX, reason="the processor has no AMX")
SLOTS = 5  # the last one has its pages in order, the others in any


@dataclass
class Kind:
    """A way to compute: logits are `error` off the model's (in bf16 and int8 on the average, as a
    share of their spread), and `noise` off what the runner itself computes in other passes."""

    make: Any
    error: float
    noise: float
    page_size: int = 4

    def open(self, model, stops=()):
        """Return a runner whose slots have the pages of LENGTH tokens each."""
        size = self.page_size
        capacity = capacity_of(model, num_slots=SLOTS, page_size=size, max_len=LENGTH)
        runner = self.make(model, capacity=capacity, stop_tokens=stops)
        for group in range(len(runner.groups)):
            for slot in range(SLOTS):
                runner.set_table(group, slot, 0, self.pages_of(group, slot))
        return runner

    def pages_of(self, group, slot):
        pages = -(-LENGTH // self.page_size)
        own = [*range(1 + slot * pages, 1 + (slot + 1) * pages)]
        return own if slot == SLOTS - 1 else random.Random(10 * group + slot).sample(own, pages)

    def check(self, found, exact):
        """Assert that logits (N, V) are the model's."""
        off = found - exact
        assert (
            off.abs().max() < self.error
            if self.error < 1e-4
            else (0 < off.square().mean().sqrt() / exact.square().mean().sqrt() < self.error)
        )

    def same(self, found, expected):
        """Assert that logits are those of another pass of this runner."""
        torch.testing.assert_close(found, expected, rtol=0, atol=self.noise)


def torchs(make, dtype=torch.float32, error=1e-5):
    return Kind(partial(make, dtype=dtype), error, error)


def native(precision, error, threads, tiles="none"):
    make = partial(NativeRunner, precision=precision, num_threads=threads, tiles=tiles)
    name = f"native {precision}, tiles {tiles}"
    marks = [needs_kernels, *([needs_amx] if tiles == "amx" else [])]
    return pytest.param(Kind(make, error, 0, 16), id=name, marks=marks)


KINDS = [
    pytest.param(torchs(TorchRunner), id="torch"),
    pytest.param(torchs(DeviceRunner), id="device"),
    pytest.param(torchs(VarlenRunner), id="one call a layer"),
    native("fp32", 1e-5, 2),
    native("bf16", 0.02, 2),
    native("int8", 0.06, 3),
    native("bf16", 0.02, 2, "emulated"),
    native("int8", 0.06, 3, "emulated"),
    native("bf16", 0.02, 2, "amx"),
    native("int8", 0.06, 3, "amx"),
]
# Its steps round otherwise than its passes: what it samples is not that of the passes' logits.
BF16 = pytest.param(torchs(TorchRunner, torch.bfloat16, 0.05), id="torch bf16")
SHAPES = {
    "shared heads": {},
    "tiny": {"width": 192, "num_heads": 3, "num_kv_heads": 3},
    "d4": {"width": 256, "num_heads": 2, "num_kv_heads": 2},
    "odd": {"width": 40, "num_heads": 4, "num_kv_heads": 1, "depth": 3, "vocab_size": 117},
    "many heads": {"width": 160, "num_heads": 10, "num_kv_heads": 2, "depth": 2},
    "short windows": {"num_kv_heads": 1, "depth": 3, "windows": (5, 9, 3)},
    "one window": {"depth": 2, "windows": (4, LENGTH)},
}
PROMPTS = [make_tokens(count, seed) for seed, count in enumerate((23, 40, 5, 1, LENGTH - 20))]
GREEDY = SamplingParams(temperature=0.0)
DRAW = SamplingParams(temperature=0.9, top_k=20)
ALL_PARAMS = [
    *(GREEDY, SamplingParams(), DRAW, SamplingParams(top_k=30, top_p=0.7)),
    SamplingParams(temperature=1.3, top_p=0.8),
]
every = pytest.mark.parametrize("kind", [*KINDS, BF16])
pytestmark = pytest.mark.torch


def sampling(kinds=KINDS):
    return pytest.mark.parametrize("kind", kinds)


def begin(runner, slot, params, **settings):
    """Read the slot's prompt and sample its first token."""
    prompt = PROMPTS[slot]
    runner.start(slot, params, key=row_key(7, slot), **{"num_log_probs": None, **settings})
    logits = read(runner, slot, prompt)
    return runner.sample_first([slot], logits, [len(prompt)], [prompt[-1]])


def decode(runner, slots, steps, limit=LENGTH):
    columns = runner.decode(slots, [limit] * len(slots), steps)().tokens
    return [list(row) for row in zip(*columns, strict=True)]


def answer(runner, slot, params, count, **settings):
    """`count` tokens of a slot, one call a step."""
    found = begin(runner, slot, params, **settings).tokens[0]
    while len(found) < count:
        found = found + decode(runner, [slot], 1)[0]
    return found


def pages_in_use(runner):
    if isinstance(runner, NativeRunner):
        return [pool.clone() for pool in runner._pools]
    return [t[:, 1:].clone() for pool in runner.pools for t in (pool.keys, pool.values)]


def addresses(runner):
    """Where matrices lie, which captured graphs and the kernels have noted."""
    if isinstance(runner, NativeRunner):
        return runner._weights.lm_head.data.data_ptr()
    return [values.data_ptr() for values in matrices_of(runner)]


@every
@pytest.mark.parametrize(
    ("era", "shape"), [*((era, "shared heads") for era in ERAS), *((HEAD, s) for s in SHAPES)]
)
@torch.no_grad()
def test_logits_of_pieces_of_any_lengths_are_those_of_the_model(kind, era, shape):
    model, rng = make_gpt(SHAPES[shape], era=era), random.Random(4)
    prompts = [[token % 100 for token in prompt] for prompt in PROMPTS]
    runner, at, found, places = kind.open(model), [0] * SLOTS, [], []
    while at != [len(p) for p in prompts]:
        pieces = []
        for slot, prompt in enumerate(prompts):
            end = min(at[slot] + rng.randint(0, 12), len(prompt))
            if end > at[slot]:
                pieces.append(chunk(slot, prompt, at[slot], end, wants=rng.random() < 0.7))
                at[slot] = end
                places += [(slot, end - 1)] * pieces[-1].wants_logits
        if pieces:
            found.append(runner.prefill(pieces))
    exact = [model(torch.tensor([prompt]))[0] for prompt in prompts]
    kind.check(torch.cat(found), torch.stack([exact[slot][end] for slot, end in places]))


@needs_amx
@needs_kernels
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_processor_with_tiles_has_the_bits_of_the_emulation(precision):
    def logits(tiles):
        make = partial(NativeRunner, precision=precision, num_threads=2, tiles=tiles)
        runner = Kind(make, 0, 0, 16).open(make_gpt(SHAPES["d4"]))
        return torch.cat([read(runner, slot, prompt) for slot, prompt in enumerate(PROMPTS)])

    assert torch.equal(logits("amx"), logits("emulated"))


@every
def test_neither_pieces_nor_company_nor_earlier_requests_change_logits(kind):
    model, (tokens, other) = make_gpt(SHAPES["d4"]), (make_tokens(n, n) for n in (LENGTH, 70))
    clean = read(kind.open(model), 3, tokens)
    for cuts in ((1,), (16, 32), (5, 6, 7, 47), tuple(range(1, LENGTH))):
        kind.same(read(kind.open(model), 4, tokens, *cuts)[-1:], clean)
    runner = kind.open(model)
    read(runner, 3, other)
    none = runner.prefill(
        [chunk(0, other, 0, 33, wants=False), chunk(3, tokens, 0, 50, wants=False)]
    )
    assert (none.shape, none.dtype) == ((0, VOCAB), torch.float32)
    crowd = [chunk(1, other, 0, 13), chunk(3, tokens, 50, LENGTH), chunk(0, other, 33, 70)]
    kind.same(runner.prefill(crowd)[1:2], clean)


@every
def test_a_page_is_copied_with_all_layers_and_left_of_the_window_it_may_be_scratch(kind):
    model, tokens = make_gpt(), make_tokens(LENGTH, 7)
    runner, cut = kind.open(model), 72  # in the middle of a page of 16
    straight = read(runner, 0, tokens, cut)[1:]
    runner.prefill([chunk(1, tokens, 0, cut)])
    for group, one in enumerate(runner.groups):
        own, new = kind.pages_of(group, 1), kind.pages_of(group, 2)
        last = (cut - 1) // kind.page_size
        runner.copy_page(group, own[last], new[last])
        gone = max(0, cut - one.window) // kind.page_size
        runner.set_table(group, 2, 0, [*[0] * gone, *own[gone:last], *new[last:]])
    fork = runner.prefill([chunk(1, [*tokens[:cut], *make_tokens(20, 9)], cut, cut + 20)])
    kind.same(runner.prefill([chunk(2, tokens, cut, LENGTH)]), straight)
    assert (fork - straight).abs().max() > 0.1


@every
def test_a_refresh_takes_over_every_parameter(kind):
    model, other = make_gpt(seed=1), make_gpt(seed=2)
    runner = kind.open(model)
    before, at = read(runner, 0, PROMPTS[1]), addresses(runner)
    model.load_state_dict(other.state_dict())
    runner.refresh()
    assert addresses(runner) == at
    after = read(runner, 0, PROMPTS[1])
    assert torch.equal(after, read(kind.open(other), 0, PROMPTS[1]))
    assert not torch.allclose(before, after)


@sampling()
@pytest.mark.parametrize("params", [None, *ALL_PARAMS], ids=str)
def test_tokens_are_sampled_from_their_own_logits_in_any_company(kind, params):
    model, chosen = make_gpt(), ALL_PARAMS if params is None else [params] * SLOTS
    runner, checker = kind.open(model), kind.open(model)
    found = [list(begin(runner, slot, chosen[slot]).tokens[0]) for slot in range(SLOTS)]
    for slots in ([0, 1, 2, 3, 4], [3, 1], [1, 0, 3], [2], [0, 1, 4, 2, 3]):
        for slot, row in zip(slots, decode(runner, slots, 4), strict=True):
            found[slot] += row
    for slot, prompt in enumerate(PROMPTS):
        text = [*prompt, *found[slot]]
        logits = read(checker, slot, text[:-1], *range(len(prompt), len(text) - 1))
        key = torch.tensor([row_key(7, slot)])
        for at, row in zip(range(len(prompt), len(text)), logits, strict=True):
            assert text[at] == sample(row[None], key, torch.tensor([at]), chosen[slot])


@sampling()
@pytest.mark.parametrize("params", [GREEDY, DRAW, ALL_PARAMS[-1]], ids=str)
def test_a_slot_stops_at_a_token_and_then_changes_nothing(kind, params):
    model = make_gpt()
    free = answer(kind.open(model), 0, params, 20)
    stop = next(token for i, token in enumerate(free) if i > 2 and token not in free[:i])
    at = free.index(stop)
    runner = kind.open(model, stops=(stop, 10**6))
    assert begin(runner, 0, params).tokens == [free[:1]]
    assert decode(runner, [0], 15) == [[*free[1 : at + 1], *[-1] * (15 - at)]]
    pages = pages_in_use(runner)
    assert decode(runner, [0], 2) == [[-1, -1]]
    assert all(torch.equal(*pair) for pair in zip(pages, pages_in_use(runner), strict=True))
    logits = torch.full((1, VOCAB), -99.0)
    logits[0, stop] = 99.0  # also the first token may be the stop
    runner.start(0, params, key=1, num_log_probs=None)
    assert runner.sample_first([0], logits, [23], [PROMPTS[0][-1]]).tokens == [[stop]]
    assert decode(runner, [0], 1) == [[-1]]


@sampling()
@pytest.mark.parametrize("params", [GREEDY, DRAW, ALL_PARAMS[-1]], ids=str)
def test_a_slot_stops_when_its_text_is_as_long_as_it_may_be(kind, params):
    model = make_gpt()
    runner, free = kind.open(model), answer(kind.open(model), 0, params, 4)
    for slot in (0, 2):
        begin(runner, slot, params)
    output = runner.decode([0, 2], [27, LENGTH], 6)().tokens
    # 23 of the prompt, one sampled at first, three more: all are returned, the last is not read.
    assert [column[0] for column in output] == [*free[1:], -1, -1, -1]
    assert all(column[1] >= 0 for column in output)
    text = [*PROMPTS[0], *free]
    kind.same(runner.prefill([chunk(0, text, 26, 27)]), read(kind.open(model), 1, text))
    begin(runner, 0, params)
    assert decode(runner, [0], 1, limit=24) == [[-1]]  # it is full as it is


@sampling()
def test_a_released_slot_is_stopped_and_a_started_one_until_its_first_token(kind):
    model = make_gpt()
    runner, params = kind.open(model), ALL_PARAMS[-1]
    first = answer(runner, 0, params, 5)
    runner.release(0)
    assert decode(runner, [0], 1) == [[-1]]
    begin(runner, 0, params)
    runner.start(0, DRAW, key=row_key(1, 1), num_log_probs=None)
    assert decode(runner, [0], 1) == [[-1]]
    assert answer(runner, 0, params, 5) == first


@sampling()
def test_forced_tokens_are_read_as_if_they_had_been_sampled(kind):
    model = make_gpt()
    runner = kind.open(model)
    text = [*PROMPTS[0], *begin(runner, 0, DRAW).tokens[0], 44, 45]
    logits = runner.prefill([chunk(0, text, 23, 26)])
    text += runner.sample_first([0], logits, [26], [45]).tokens[0]
    decode(runner, [0], 1)
    text += [46]
    kind.same(runner.prefill([chunk(0, text, 27, 28)]), read(kind.open(model), 3, text))


@sampling()
def test_log_probs_are_those_of_the_logits_of_slots_that_want_them_and_change_no_token(kind):
    model, params = make_gpt(), SamplingParams(temperature=2.0)
    plain, runner = kind.open(model), kind.open(model)
    firsts = [begin(plain, 1, params), begin(runner, 1, params, num_log_probs=3)]
    assert firsts[0].tokens == firsts[1].tokens
    assert not firsts[0].log_probs
    for one in (plain, runner):
        begin(one, 0, params)
    output = runner.decode([0, 1], [LENGTH] * 2, 3)()
    expected = plain.decode([0, 1], [LENGTH] * 2, 3)()
    assert (output.tokens, expected.log_probs) == (expected.tokens, [])
    text = [*PROMPTS[1], firsts[1].tokens[0][0], *(column[1] for column in output.tokens)]
    logits = read(plain, 2, text[:-1], *range(40, len(text) - 1)).log_softmax(-1)
    assert [none for none, _ in output.log_probs] == [None] * 3
    reported = [firsts[1].log_probs[0][0], *(mine for _, mine in output.log_probs)]
    for row, token, mine in zip(logits, text[40:], reported, strict=True):
        top = row.topk(3)
        assert mine.chosen == pytest.approx(float(row[token]), abs=1e-4)
        assert [i for i, _ in mine.top] == top.indices.tolist()
        assert [p for _, p in mine.top] == pytest.approx(top.values.tolist(), abs=1e-4)
