"""The runner in plain torch, beside the model's own forward pass."""

import random

import pytest
import torch

from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runner import Capacity, Chunk
from nanochat_core.engine.runners.choose import page_groups
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.engine.sampling import row_key, sample
from nanochat_core.eras import ERAS, numerics, of_era
from nanochat_core.model.gpt import GPT
from tests.support.nanochat_core.engine.row_keys import row_keys
from tests.support.nanochat_core.engine.torch_slots import (
    GREEDY,
    LONGEST,
    PAGES,
    STOP,
    begin,
    expected,
    give_pages,
    open_small,
    plain_varlen,
    prompts_of,
    read_in_pieces,
    whole,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_kv_heads": 1},
        {"windows": (4, 64)},
        {"windows": (64,)},
        {"windows": (5, 9, 3), "num_kv_heads": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("scattered", "varlen"),
    [(False, None), (True, None), (True, plain_varlen)],
    ids=["in order", "scattered", "one call a layer"],
)
def test_chunks_of_any_lengths_give_the_models_logits(make_model, shape, scattered, varlen):
    model, rng = make_model(**shape), random.Random(4)
    runner = open_small(model)
    runner._varlen = varlen
    prompts = prompts_of(4, seed=5)
    for slot in range(4):
        give_pages(runner, slot, rng=rng if scattered else None)
    logits = read_in_pieces(runner, prompts, rng)
    for prompt, row in zip(prompts, logits, strict=True):
        torch.testing.assert_close(row, expected(model, prompt), rtol=0, atol=1e-5)
        assert runner.length[prompts.index(prompt)] == len(prompt)


def test_long_prompts_are_read_in_blocks_with_the_models_logits():
    from nanochat_core.config import ModelConfig

    config = ModelConfig(
        depth=3,
        width=32,
        num_heads=2,
        num_kv_heads=2,
        sequence_len=512,
        vocab_size=265,
        windows=(140, 512, 512),
    )
    model = GPT(config, numerics("fp32")).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    runner = TorchRunner(
        model,
        dtype=torch.float32,
        capacity=Capacity(
            groups=page_groups(config, num_pages=40), page_size=16, num_slots=1, max_len=512
        ),
        stop_tokens=[],
    )
    tokens = torch.randint(0, 256, (450,), generator=generator).tolist()
    for group in range(2):
        runner.set_table(group, 0, 0, range(1, 33))
    torch.testing.assert_close(whole(runner, 0, tokens), expected(model, tokens), rtol=0, atol=2e-5)
    runner.prefill([Chunk(slot=0, start=0, prev_token=-1, tokens=tokens[:190], wants_logits=False)])
    [row] = runner.prefill(
        [Chunk(slot=0, start=190, prev_token=tokens[189], tokens=tokens[190:], wants_logits=True)]
    )
    torch.testing.assert_close(row, expected(model, tokens), rtol=0, atol=2e-5)


@pytest.mark.parametrize("era", ERAS)
@torch.no_grad()
def test_every_eras_constants_are_folded_in(make_model, era):
    config = of_era(make_model().config, era, pattern="L")
    model = GPT(config, numerics("fp32", era=era)).eval()
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.normal_(std=0.3, generator=generator)
    runner = open_small(model)
    prompts = prompts_of(2, seed=3)
    begin(runner, prompts, GREEDY)
    for slot, prompt in enumerate(prompts):
        torch.testing.assert_close(
            whole(runner, slot, prompt), expected(model, prompt), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(), SamplingParams(top_k=5, temperature=0.7)], ids=str
)
def test_decoding_draws_what_the_model_says_at_each_position(make_model, params):
    model = make_model(windows=(6, 64))
    runner = open_small(model)
    prompts = prompts_of(4, seed=9, longest=30)
    begin(runner, prompts, params)
    runner.stop_tokens = frozenset()
    logits = torch.stack([whole(runner, slot, p) for slot, p in enumerate(prompts)])
    columns = runner.sample_first(
        range(4), logits, [len(p) for p in prompts], [p[-1] for p in prompts]
    )
    output = [*columns.tokens, *runner.decode(range(4), [LONGEST] * 4, 20)().tokens]
    for slot, prompt in enumerate(prompts):
        key = row_keys(torch.tensor([7]), torch.tensor([slot]))
        sequence = list(prompt)
        for column in output:
            position = torch.tensor([len(sequence)])
            token = sample(expected(model, sequence)[None], key, position, params)
            assert column[slot] == int(token)
            sequence.append(column[slot])


def test_a_slot_stops_at_its_limit_and_at_stop_tokens_and_then_changes_nothing(make_model):
    model = make_model()
    runner = open_small(model)
    prompts = [[1, 2, 3], [4, 5]]
    begin(runner, prompts, GREEDY)
    logits = torch.stack([whole(runner, slot, p) for slot, p in enumerate(prompts)])
    runner.sample_first([0, 1], logits, [3, 2], [3, 5])
    [first, second] = runner.decode([0, 1], [6, 4], 2)().tokens
    assert first[1] >= 0  # with the token before it that makes 4
    assert second[1] == -1
    assert second[0] >= 0
    assert runner.stopped[:2].all()
    before = (runner.length[:2].tolist(), runner.token[:2].tolist())
    pages = [pool.keys.clone() for pool in runner.pools]
    assert runner.decode([0, 1], [6, 4], 3)().tokens == [[-1, -1]] * 3
    assert (runner.length[:2].tolist(), runner.token[:2].tolist()) == before
    assert all(torch.equal(a, p.keys) for a, p in zip(pages, runner.pools, strict=True))
    # It is told, and not read.
    assert before[0][0] == 5
    # The limit is looked at before a step, too.
    runner.sample_first([0], logits[:1], [3], [3])
    assert runner.decode([0], [4], 1)().tokens == [[-1]]


def test_stop_tokens_stop_a_slot_from_its_first_token_on(make_model):
    model = make_model()
    runner = open_small(model)
    prompt = [1, 2, 3]

    def answer(logits: torch.Tensor) -> list[list[int]]:
        begin(runner, [prompt], SamplingParams())
        first = runner.sample_first([0], logits[None], [3], [3]).tokens
        return [*first, *runner.decode([0], [LONGEST], 8)().tokens]

    begin(runner, [prompt], SamplingParams())
    logits = whole(runner, 0, prompt)
    runner.stop_tokens = frozenset()
    free = [token for [token] in answer(logits)]
    fourth = free.index(free[3])
    runner.stop_tokens = frozenset([free[3]])
    stopped = [token for [token] in answer(logits)]
    assert stopped == [*free[: fourth + 1], *[-1] * (len(free) - fourth - 1)]
    assert fourth > 0
    runner.stop_tokens = frozenset([STOP])
    certain = logits.clone()
    certain[STOP] = 99.0
    assert answer(certain) == [[STOP], *[[-1]] * 8]


def test_released_slots_and_other_slots_in_the_batch_change_nothing(make_model):
    model = make_model()
    prompts = prompts_of(4, seed=11)
    runner = open_small(model)
    params = SamplingParams(top_p=0.9)

    def answer(slots: list[int]) -> dict[int, list[int]]:
        begin(runner, prompts, params)
        runner.stop_tokens = frozenset()
        for slot in slots:
            logits = whole(runner, slot, prompts[slot])
            runner.sample_first([slot], logits[None], [len(prompts[slot])], [prompts[slot][-1]])
        columns = runner.decode(slots, [LONGEST] * len(slots), 6)().tokens
        return {slot: [column[i] for column in columns] for i, slot in enumerate(slots)}

    together = answer([0, 1, 2, 3])
    assert {s: answer([s])[s] for s in range(4)} == together
    assert answer([2, 0]) == {s: together[s] for s in (2, 0)}
    runner.release(3)
    assert runner.decode([3], [LONGEST], 1)().tokens == [[-1]]


def test_a_copied_page_carries_all_layers(make_model):
    model = make_model()
    runner = open_small(model)
    prompt = [7, 100, 30, 2, 250, 61]
    begin(runner, [prompt, prompt], GREEDY)
    whole(runner, 0, prompt)
    for group in range(len(runner.groups)):
        runner.copy_page(group, 1, 1 + PAGES)  # the first page of each slot
        runner.copy_page(group, 2, 2 + PAGES)
    chunk = Chunk(slot=1, start=6, prev_token=prompt[5], tokens=[9, 8], wants_logits=True)
    torch.testing.assert_close(
        runner.prefill([chunk])[0], expected(model, [*prompt, 9, 8]), rtol=0, atol=1e-5
    )


def test_tokens_seen_are_penalised_prompt_and_answer_alike(make_model):
    model = make_model()
    runner = open_small(model)
    params = SamplingParams(repetition_penalty=1.8, top_k=20)
    prompt = prompts_of(1, seed=6)[0]
    begin(runner, [prompt], params)
    runner.stop_tokens = frozenset()
    runner.remember(0, prompt)
    logits = whole(runner, 0, prompt)
    output = runner.sample_first([0], logits[None], [len(prompt)], [prompt[-1]]).tokens
    output += runner.decode([0], [LONGEST], 10)().tokens
    sequence, key = list(prompt), row_keys(torch.tensor([7]), torch.tensor([0]))
    for [token] in output:
        seen = torch.zeros(1, 265, dtype=torch.bool)
        seen[0, sequence] = True
        position = torch.tensor([len(sequence)])
        sampled = sample(expected(model, sequence)[None], key, position, params, seen)
        assert int(sampled) == token
        sequence.append(token)
    # The next occupant has seen nothing of it.
    runner.start(0, params, key=row_key(1, 0), num_log_probs=None)
    assert runner.sampler.seen is not None
    assert not runner.sampler.seen[0].any()


def test_log_probs_are_reported_of_the_slots_that_want_them(make_model):
    model = make_model()
    runner = open_small(model)
    prompts = prompts_of(2, seed=8)
    begin(runner, prompts, SamplingParams(temperature=2.0))
    runner.stop_tokens = frozenset()
    runner.start(1, SamplingParams(temperature=2.0), key=row_key(7, 1), num_log_probs=3)
    logits = torch.stack([whole(runner, slot, p) for slot, p in enumerate(prompts)])
    first = runner.sample_first([0, 1], logits, [len(p) for p in prompts], [p[-1] for p in prompts])
    then = runner.decode([0, 1], [LONGEST] * 2, 3)()
    sequence = list(prompts[1])
    for column, [none, output] in zip(
        [*first.tokens, *then.tokens], [*first.log_probs, *then.log_probs], strict=True
    ):
        assert none is None
        reference = torch.log_softmax(expected(model, sequence), dim=-1)
        assert output.chosen == pytest.approx(float(reference[column[1]]), abs=1e-4)
        assert [token for token, _ in output.top] == reference.topk(3).indices.tolist()
        assert [p for _, p in output.top] == pytest.approx(
            reference.topk(3).values.tolist(), abs=1e-4
        )
        sequence.append(column[1])
