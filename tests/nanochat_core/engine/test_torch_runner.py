"""The runner in plain torch, beside the model's own forward pass."""

import random

import pytest
import torch

from nanochat_core.engine.requests import SamplingParams
from nanochat_core.engine.runner import Chunk
from nanochat_core.engine.runners.choose import page_groups
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.engine.sampling import row_keys, sample
from nanochat_core.eras import ERAS, numerics, of_era
from nanochat_core.model.gpt import GPT
from tests.nanochat_core.engine.torch_slots import (
    GREEDY,
    LONGEST,
    PAGES,
    PARK,
    begin,
    expected,
    give_pages,
    open_small,
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
@pytest.mark.parametrize("scattered", [False, True], ids=["in order", "scattered"])
def test_chunks_of_any_lengths_give_the_models_logits(make_model, shape, scattered):
    model, rng = make_model(**shape), random.Random(4)
    runner = open_small(model)
    prompts = prompts_of(4, seed=5)
    for slot in range(4):
        give_pages(runner, slot, rng=rng if scattered else None)
    logits = read_in_pieces(runner, prompts, rng)
    for prompt, row in zip(prompts, logits, strict=True):
        torch.testing.assert_close(row, expected(model, prompt), rtol=0, atol=1e-5)
        assert runner.slots[prompts.index(prompt)].length == len(prompt)


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
        groups=page_groups(config, num_pages=40),
        page_size=16,
        num_slots=1,
        max_len=512,
        park_tokens=[],
    )
    tokens = torch.randint(0, 256, (450,), generator=generator).tolist()
    for group in range(2):
        runner.set_table(group, 0, 0, range(1, 33))
    torch.testing.assert_close(whole(runner, 0, tokens), expected(model, tokens), rtol=0, atol=2e-5)
    runner.prefill([Chunk(slot=0, start=0, before=-1, tokens=tokens[:190], wants_logits=False)])
    [row] = runner.prefill(
        [Chunk(slot=0, start=190, before=tokens[189], tokens=tokens[190:], wants_logits=True)]
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
    "draw", [GREEDY, SamplingParams(), SamplingParams(top_k=5, temperature=0.7)], ids=str
)
def test_decoding_draws_what_the_model_says_at_each_position(make_model, draw):
    model = make_model(windows=(6, 64))
    runner = open_small(model)
    prompts = prompts_of(4, seed=9, longest=30)
    begin(runner, prompts, draw)
    runner.park_tokens = frozenset()
    logits = torch.stack([whole(runner, slot, p) for slot, p in enumerate(prompts)])
    columns = runner.draw_first(
        range(4), logits, [len(p) for p in prompts], [p[-1] for p in prompts]
    )
    told = [*columns.tokens, *runner.decode(range(4), [LONGEST] * 4, 20).read().tokens]
    for slot, prompt in enumerate(prompts):
        key = row_keys(torch.tensor([7]), torch.tensor([slot]))
        sequence = list(prompt)
        for column in told:
            token = sample(
                expected(model, sequence)[None],
                key,
                torch.tensor([len(sequence)]),
                temperature=draw.temperature,
                top_k=draw.top_k,
            )
            assert column[slot] == int(token)
            sequence.append(column[slot])


def test_a_slot_parks_at_its_limit_and_at_park_tokens_and_then_changes_nothing(make_model):
    model = make_model()
    runner = open_small(model)
    prompts = [[1, 2, 3], [4, 5]]
    begin(runner, prompts, GREEDY)
    logits = torch.stack([whole(runner, slot, p) for slot, p in enumerate(prompts)])
    runner.draw_first([0, 1], logits, [3, 2], [3, 5])
    [first, second] = runner.decode([0, 1], [6, 4], 2).read().tokens
    assert first[1] >= 0  # with the token before it that makes 4
    assert second[1] == -1
    assert second[0] >= 0
    assert runner.slots[0].parked
    assert runner.slots[1].parked
    before = [(s.length, s.token) for s in runner.slots[:2]]
    pages = [pool.keys.clone() for pool in runner.pools]
    assert runner.decode([0, 1], [6, 4], 3).read().tokens == [[-1, -1]] * 3
    assert [(s.length, s.token) for s in runner.slots[:2]] == before
    assert all(torch.equal(a, p.keys) for a, p in zip(pages, runner.pools, strict=True))
    # It is told, and not read.
    assert before[0][0] == 5
    # The limit is looked at before a step, too.
    runner.draw_first([0], logits[:1], [3], [3])
    assert runner.decode([0], [4], 1).read().tokens == [[-1]]


def test_park_tokens_park_in_the_first_draw_and_later(make_model):
    model = make_model()
    runner = open_small(model)
    prompt = [1, 2, 3]

    def answer(logits: torch.Tensor) -> list[list[int]]:
        begin(runner, [prompt], SamplingParams())
        first = runner.draw_first([0], logits[None], [3], [3]).tokens
        return [*first, *runner.decode([0], [LONGEST], 8).read().tokens]

    begin(runner, [prompt], SamplingParams())
    logits = whole(runner, 0, prompt)
    runner.park_tokens = frozenset()
    free = [token for [token] in answer(logits)]
    fourth = free.index(free[3])
    runner.park_tokens = frozenset([free[3]])
    parked = [token for [token] in answer(logits)]
    assert parked == [*free[: fourth + 1], *[-1] * (len(free) - fourth - 1)]
    assert fourth > 0
    runner.park_tokens = frozenset([PARK])
    certain = logits.clone()
    certain[PARK] = 99.0
    assert answer(certain) == [[PARK], *[[-1]] * 8]


def test_released_slots_and_other_slots_in_the_batch_change_nothing(make_model):
    model = make_model()
    prompts = prompts_of(4, seed=11)
    runner = open_small(model)
    draw = SamplingParams(top_p=0.9)

    def answer(slots: list[int]) -> dict[int, list[int]]:
        begin(runner, prompts, draw)
        runner.park_tokens = frozenset()
        for slot in slots:
            logits = whole(runner, slot, prompts[slot])
            runner.draw_first([slot], logits[None], [len(prompts[slot])], [prompts[slot][-1]])
        columns = runner.decode(slots, [LONGEST] * len(slots), 6).read().tokens
        return {slot: [column[i] for column in columns] for i, slot in enumerate(slots)}

    together = answer([0, 1, 2, 3])
    assert {s: answer([s])[s] for s in range(4)} == together
    assert answer([2, 0]) == {s: together[s] for s in (2, 0)}
    runner.release(3)
    assert runner.decode([3], [LONGEST], 1).read().tokens == [[-1]]


def test_a_copied_page_carries_all_layers(make_model):
    model = make_model()
    runner = open_small(model)
    prompt = [7, 100, 30, 2, 250, 61]
    begin(runner, [prompt, prompt], GREEDY)
    whole(runner, 0, prompt)
    for group in range(len(runner.groups)):
        runner.copy_page(group, 1, 1 + PAGES)  # the first page of each slot
        runner.copy_page(group, 2, 2 + PAGES)
    chunk = Chunk(slot=1, start=6, before=prompt[5], tokens=[9, 8], wants_logits=True)
    torch.testing.assert_close(
        runner.prefill([chunk])[0], expected(model, [*prompt, 9, 8]), rtol=0, atol=1e-5
    )


def test_tokens_seen_are_penalised_prompt_and_answer_alike(make_model):
    model = make_model()
    runner = open_small(model)
    draw = SamplingParams(repetition_penalty=1.8, top_k=20)
    prompt = prompts_of(1, seed=6)[0]
    begin(runner, [prompt], draw)
    runner.park_tokens = frozenset()
    runner.remember(0, prompt)
    logits = whole(runner, 0, prompt)
    told = runner.draw_first([0], logits[None], [len(prompt)], [prompt[-1]]).tokens
    told += runner.decode([0], [LONGEST], 10).read().tokens
    sequence, key = list(prompt), row_keys(torch.tensor([7]), torch.tensor([0]))
    for [token] in told:
        seen = torch.zeros(1, 265, dtype=torch.bool)
        seen[0, sequence] = True
        drawn = sample(
            expected(model, sequence)[None],
            key,
            torch.tensor([len(sequence)]),
            temperature=1.0,
            top_k=20,
            repetition_penalty=1.8,
            seen=seen,
        )
        assert int(drawn) == token
        sequence.append(token)
    # The next occupant has seen nothing of it.
    runner.start(0, draw=draw, seed=1, sample=0, num_log_probs=None)
    assert runner._seen is not None
    assert not runner._seen[0].any()


def test_log_probs_are_told_of_the_slots_that_want_them(make_model):
    model = make_model()
    runner = open_small(model)
    prompts = prompts_of(2, seed=8)
    begin(runner, prompts, SamplingParams(temperature=2.0))
    runner.park_tokens = frozenset()
    runner.start(1, draw=SamplingParams(temperature=2.0), seed=7, sample=1, num_log_probs=3)
    logits = torch.stack([whole(runner, slot, p) for slot, p in enumerate(prompts)])
    first = runner.draw_first([0, 1], logits, [len(p) for p in prompts], [p[-1] for p in prompts])
    then = runner.decode([0, 1], [LONGEST] * 2, 3).read()
    sequence = list(prompts[1])
    for column, [none, told] in zip(
        [*first.tokens, *then.tokens], [*first.log_probs, *then.log_probs], strict=True
    ):
        assert none is None
        reference = torch.log_softmax(expected(model, sequence), dim=-1)
        assert told.chosen == pytest.approx(float(reference[column[1]]), abs=1e-4)
        assert [token for token, _ in told.top] == reference.topk(3).indices.tolist()
        assert [p for _, p in told.top] == pytest.approx(
            reference.topk(3).values.tolist(), abs=1e-4
        )
        sequence.append(column[1])
