"""The kernels' logits are the model's, and a row's bits are its own whatever surrounds it."""

import pytest
import torch
from torch import Tensor

from nanochat_core.engine.native import build
from nanochat_core.engine.native.runner import page_bytes
from nanochat_core.engine.native.weights import FORMS, PAGE_SIZE, Precision
from nanochat_core.eras import ERAS
from nanochat_core.model.gpt import GPT
from tests.support.nanochat_core.engine.native_models import (
    LENGTH,
    chunk,
    make_gpt,
    make_runner,
    make_tokens,
    page_groups,
    read,
)

REASON = build.unable_here()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(REASON is not None, reason=f"no kernels here: {REASON}"),
]

SHAPES: dict[str, dict[str, int]] = {
    "shared heads": {},
    "tiny": {"width": 192, "num_heads": 3, "num_kv_heads": 3},
    "d4": {"width": 256, "num_heads": 2, "num_kv_heads": 2},
    "odd": {"width": 40, "num_heads": 4, "num_kv_heads": 1, "depth": 3, "vocab_size": 117},
    "many heads": {"width": 160, "num_heads": 10, "num_kv_heads": 2, "depth": 2},
}
TOKENS = make_tokens(LENGTH, 7)


@torch.no_grad()
def expected(model: GPT, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens]))[0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("era", ERAS)
def test_fp32_logits_are_those_of_the_model(era: str, shape: dict[str, int]) -> None:
    model = make_gpt(shape, era=era)
    reference = expected(model, TOKENS)
    runner = make_runner(model)
    cuts = (1, 2, 37, *range(60, LENGTH))
    logits = read(runner, 1, TOKENS, *cuts)
    assert logits.shape == (len(cuts) + 1, model.config.vocab_size)
    at = torch.tensor([*cuts, LENGTH]) - 1
    torch.testing.assert_close(logits, reference[at], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.02), ("int8", 0.06)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_low_precisions_stay_near_the_model(
    precision: Precision, bound: float, shape: dict[str, int]
) -> None:
    model = make_gpt(shape)
    reference = expected(model, TOKENS)[39:]
    logits = read(make_runner(model, precision=precision), 0, TOKENS, *range(40, LENGTH))
    error = (logits - reference).pow(2).mean().sqrt() / reference.pow(2).mean().sqrt()
    assert 0 < error < bound


@pytest.mark.parametrize("precision", FORMS)
def test_neither_chunks_nor_company_nor_threads_change_a_bit(precision: Precision) -> None:
    model = make_gpt({"width": 128})
    alone = read(make_runner(model, precision=precision, num_threads=1), 0, TOKENS)
    for cuts in ((1,), (16, 32), (5, 6, 7, 47), tuple(range(1, LENGTH))):
        logits = read(make_runner(model, precision=precision), 2, TOKENS, *cuts)
        assert torch.equal(logits[-1:], alone), cuts
    runner = make_runner(model, precision=precision, num_threads=3)
    other = make_tokens(70, 8)
    runner.prefill([chunk(0, other, 0, 33, wants=False), chunk(3, TOKENS, 0, 50, wants=False)])
    crowd = [chunk(1, other, 0, 13), chunk(3, TOKENS, 50, LENGTH), chunk(0, other, 33, 70)]
    assert torch.equal(runner.prefill(crowd)[1:2], alone)


@pytest.mark.parametrize("precision", FORMS)
def test_what_an_earlier_request_left_in_a_page_is_never_read(precision: Precision) -> None:
    model = make_gpt()
    runner = make_runner(model, precision=precision)
    clean = read(runner, 0, TOKENS, 40)
    for pool in runner._pools:
        pool.fill_(0xFF)  # a NaN in every form
    assert torch.equal(read(runner, 0, TOKENS, 40), clean)


@pytest.mark.parametrize("precision", FORMS)
def test_pages_left_of_the_window_may_be_scratch(precision: Precision) -> None:
    model = make_gpt()
    whole = read(make_runner(model, precision=precision), 0, TOKENS, 80)
    runner = make_runner(model, precision=precision)
    runner.prefill([chunk(0, TOKENS, 0, 80)])
    short = next(i for i, group in enumerate(runner.groups) if group.window == 21)
    runner.set_table(short, 0, 0, [0] * ((80 - 21) // PAGE_SIZE))
    assert torch.equal(runner.prefill([chunk(0, TOKENS, 80, LENGTH)])[0], whole[1])


@pytest.mark.parametrize("precision", FORMS)
def test_a_copied_page_goes_its_own_way(precision: Precision) -> None:
    model = make_gpt()
    runner = make_runner(model, precision=precision)
    straight = read(runner, 0, TOKENS, 40)[1]
    runner.prefill([chunk(1, TOKENS, 0, 40)])
    for group in range(len(runner.groups)):
        table = runner._tables[group]
        own = table[2].tolist()
        runner.copy_page(group, int(table[1][2]), own[2])
        runner.set_table(group, 2, 0, [*table[1][:2].tolist(), *own[2:]])
    other = runner.prefill([chunk(1, [*TOKENS[:40], *make_tokens(20, 9)], 40, 60)])
    forked = runner.prefill([chunk(2, TOKENS, 40, LENGTH)])[0]
    assert torch.equal(forked, straight)
    assert not torch.equal(other[0], straight)


@pytest.mark.parametrize("precision", FORMS)
def test_refresh_takes_over_every_parameter(precision: Precision) -> None:
    model, other = make_gpt(seed=1), make_gpt(seed=2)
    runner = make_runner(model, precision=precision)
    pointer = runner._weights.lm_head.data.data_ptr()
    model.load_state_dict(other.state_dict())
    runner.refresh()
    assert runner._weights.lm_head.data.data_ptr() == pointer
    fresh = read(make_runner(other, precision=precision), 0, TOKENS)
    assert torch.equal(read(runner, 0, TOKENS), fresh)


@pytest.mark.parametrize(
    "name", ["lm_head", "transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_q"]
)
def test_a_nan_among_the_weights_is_one_where_torch_has_one(name: str) -> None:
    model = make_gpt()
    model.get_parameter(f"{name}.weight").data[5, 0] = torch.nan
    logits = read(make_runner(model), 0, TOKENS)
    assert logits.isnan().any()
    assert torch.equal(logits.isnan(), expected(model, TOKENS)[-1:].isnan())


@pytest.mark.parametrize("precision", FORMS)
def test_memory_of_pages_is_what_was_stated(precision: Precision) -> None:
    model = make_gpt()
    runner = make_runner(model, precision=precision)
    for group, pool in zip(page_groups(model.config, num_pages=25), runner._pools, strict=True):
        assert pool.nbytes == 25 * page_bytes(model.config, precision, group)


def test_tokens_outside_the_vocabulary_are_our_own_bug() -> None:
    runner = make_runner(make_gpt())
    for bad in (-1, 100):
        with pytest.raises(AssertionError, match="token"):
            runner.prefill([chunk(0, [3, bad], 0, 2)])
