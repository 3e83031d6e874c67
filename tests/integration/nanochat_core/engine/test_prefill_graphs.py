"""Prefill passes: of a few lengths, padded, on a GPU as CUDA graphs; attention a call a layer."""

import itertools
import random
from functools import partial

import pytest
import torch

from bench.gpu.prefill_ops import Operations
from nanochat_core.engine.runners import prefill_graphs
from nanochat_core.engine.runners.device_runner import DeviceRunner
from nanochat_core.engine.runners.prefill_attention import difference, find_varlen, varlen
from nanochat_core.engine.runners.prefill_graphs import (
    PassKind,
    kind_of,
    kinds_up_to,
    pack,
    padding,
)
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import model_for_depth, numerics
from tests.support.nanochat_core.engine.native_models import chunk, read
from tests.support.nanochat_core.engine.torch_slots import (
    LONGEST,
    expected,
    give_pages,
    open_small,
    plain_varlen,
)
from tests.support.nanochat_core.random_gpt import capacity_of, random_gpt

pytestmark = pytest.mark.torch
SLOTS = 2
PROMPT = random.Random(5).choices(range(256), k=60)


def open_runner(model, **settings):
    return DeviceRunner(
        model, capacity=capacity_of(model, num_slots=SLOTS), stop_tokens=(), **settings
    )


def pages_of(runner):
    return [memory for pool in runner.pools for memory in (pool.keys, pool.values)]


@pytest.mark.parametrize(
    "shape", [{}, {"windows": (5, 9, 3), "num_kv_heads": 1}, {"windows": (64,)}], ids=str
)
@torch.inference_mode()
def test_a_padded_pass_gives_the_models_logits_and_writes_only_the_chunks_keys(make_model, shape):
    model = make_model(**shape)
    runner, plain = (open_runner(model, dtype=torch.float32) for _ in range(2))
    runner._varlen = plain._varlen = plain_varlen
    for memory in pages_of(runner):
        memory[:, 0] = 1e3  # the scratch page: whatever it holds, no query may see it
    for slot in range(SLOTS):
        give_pages(runner, slot)
        give_pages(plain, slot)
    prompt = PROMPT
    # Whole, and again in pieces: of the first token, within one window of it, and of the last one.
    for ends in ([len(prompt)], [1, 4, len(prompt) - 1, len(prompt)]):
        for start, end in itertools.pairwise([0, *ends]):
            one = chunk(1, prompt, start, end)
            kind = kind_of([one], runner.pools)
            assert kind == PassKind(128, continues=start > 0)
            logits = runner.read_packed(kind, pack(kind, one, runner.pools))
            torch.testing.assert_close(logits, plain.prefill([one]), rtol=0, atol=1e-5)
            torch.testing.assert_close(logits[0], expected(model, prompt[:end]), rtol=0, atol=1e-5)
    for mine, theirs in zip(pages_of(runner), pages_of(plain), strict=True):
        torch.testing.assert_close(mine[:, 1:], theirs[:, 1:], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_pass_of_padding_alone_writes_to_the_scratch_pages_alone(make_model):
    runner = open_runner(make_model(), dtype=torch.float32)
    runner._varlen = plain_varlen
    give_pages(runner, 0)
    for kind in kinds_up_to(LONGEST):
        runner.read_packed(kind, padding(kind, runner.pools, runner.device))
    for memory in pages_of(runner):
        assert memory[:, 0].any()
        assert not memory[:, 1:].any()


@pytest.mark.parametrize(
    ("num_tokens", "lengths"),
    [(64, [128]), (129, [256, 128]), (256, [256, 128]), (4096, [2048, 1024, 512, 256, 128])],
)
def test_kinds_reach_the_longest_chunk_and_no_further(num_tokens, lengths):
    kinds = [(kind.num_tokens, kind.continues) for kind in kinds_up_to(num_tokens)]
    assert sorted(kinds) == sorted(itertools.product(lengths, (False, True)))
    assert kinds[0][0] == lengths[0]


def test_only_one_chunk_that_fits_is_a_graph(make_model, monkeypatch):
    pools = open_runner(make_model(windows=(6, 64)), dtype=torch.float32).pools
    tokens = [1] * LONGEST
    one = chunk(0, tokens, 40, 60)
    assert kind_of([one], pools) == PassKind(128, continues=True)
    assert kind_of([one, chunk(1, tokens, 0, 9)], pools) is None
    assert kind_of([chunk(0, tokens, 0, 9, wants=False)], pools) is None
    monkeypatch.setattr(prefill_graphs, "MAX_BEFORE", 39)
    assert kind_of([one], pools) is None
    assert kind_of([chunk(0, tokens, 39, 60)], pools) is not None
    monkeypatch.setattr(prefill_graphs, "LENGTHS", (8, 16))
    assert kind_of([chunk(0, tokens, 0, 17)], pools) is None
    assert kind_of([chunk(0, tokens, 0, 9)], pools) == PassKind(16, continues=False)


@pytest.mark.skipif(torch.version.cuda is not None, reason="its capture fails in another way")
def test_without_graphs_prompts_are_read_all_the_same(make_model, caplog):
    model = make_model()
    runner = open_runner(model, dtype=torch.float32)
    assert runner._capture_passes(None) is None
    assert not caplog.records
    runner._varlen = plain_varlen
    runner.passes = runner._capture_passes(None)
    assert runner.passes is None
    assert "prompts are read without CUDA graphs" in caplog.text
    give_pages(runner, 0)
    [row] = runner.prefill([chunk(0, PROMPT, 0, len(PROMPT))])
    torch.testing.assert_close(row, expected(model, PROMPT), rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_captured_passes_give_the_logits_of_plain_ones(make_model, num_kv_heads, kernels):
    model = make_model(windows=(6, 64), num_kv_heads=num_kv_heads).to("cuda")
    runner = open_runner(model, dtype=torch.bfloat16, graphs=True, kernels=kernels)
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("varlen_attn cannot run")
    passes = runner.passes
    assert list(passes.captured) == kinds_up_to(LONGEST)
    prompt = PROMPT

    def read():
        """Read the prompt whole into slot 0 and in pieces into slot 1."""
        rows = []
        for slot, ends in enumerate(([len(prompt)], [1, 4, len(prompt) - 1, len(prompt)])):
            give_pages(runner, slot)
            for start, end in itertools.pairwise([0, *ends]):
                rows.append(runner.prefill([chunk(slot, prompt, start, end)]))
            assert runner.length[slot] == len(prompt)
        return torch.cat(rows), [memory[:, 1:].clone() for memory in pages_of(runner)]

    logits, pages = read()
    for memory in pages_of(runner):
        memory[:, 0] = 1e3
    again, _ = read()
    assert torch.equal(logits, again)  # to the bit, whatever the scratch page holds
    runner.passes = None
    for memory in pages_of(runner):
        memory.zero_()
    plain, plain_pages = read()
    assert list(passes.captured) == kinds_up_to(LONGEST)
    assert (logits - plain).abs().max() < 0.03 * plain.abs().max()
    for mine, theirs in zip(pages, plain_pages, strict=True):
        assert (mine - theirs).abs().max() <= 0.03 * theirs.abs().max()


# Passes in plain torch: one call of attention a layer, or blocks; without a GPU.

CPU = torch.device("cpu")


def test_the_check_finds_windows_and_ends_that_are_counted_in_another_way():
    check = partial(difference, device=CPU, dtype=torch.float32, head_dim=8)

    def narrow(*args, window, scale):
        return plain_varlen(*args, window=window - 1, scale=scale)

    def at_the_first_key(q, k, v, query_ends, key_ends, *sizes, **settings):
        # A sequence's first query at its first key: the keys behind its last query are not seen.
        counts, lengths = query_ends.diff().tolist(), key_ends.diff().tolist()
        keys, values = (
            torch.cat(
                [one[:count] for one, count in zip(t[:-1].split(lengths), counts, strict=True)]
            )
            for t in (k, v)
        )
        ends, most = (query_ends, query_ends), (sizes[0], sizes[0])
        return plain_varlen(q, keys, values, *ends, *most, **settings)

    assert check(plain_varlen) < 1e-5
    assert check(narrow) > 0.03
    assert check(at_the_first_key) > 0.03
    assert not check(lambda *args, **settings: args[0] * torch.nan) <= 0.03


def test_where_it_cannot_run_chunks_are_read_one_by_one_and_the_reason_is_logged(caplog):
    assert find_varlen(CPU, torch.bfloat16, 128) is None
    assert find_varlen(torch.device("cuda"), torch.float32, 128) is None
    assert not caplog.records
    if not torch.cuda.is_available():
        assert find_varlen(torch.device("cuda"), torch.bfloat16, 128) is None
        assert "prompts are read chunk by chunk" in caplog.text


@pytest.mark.parametrize("started", [False, True], ids=["whole", "begun"])
def test_operations_of_a_pass_do_not_depend_on_the_number_of_chunks(started):
    with torch.device("meta"):
        model = GPT(model_for_depth(4), numerics("bf16"))
    capacity = capacity_of(model, num_slots=8, page_size=256, max_len=2048, num_pages=80)
    runner = TorchRunner(model, dtype=torch.bfloat16, capacity=capacity, stop_tokens=[])
    runner._varlen = varlen  # torch's own, by its rules for meta tensors
    for slot in range(8):
        give_pages(runner, slot)
    found = []
    start = 512 if started else 0
    for count in (1, 8):
        tokens = [1] * (start + 1024 // count)
        chunks = [chunk(i, tokens, start, len(tokens)) for i in range(count)]
        with Operations() as operations:
            assert runner.prefill(chunks).shape == (count, model.config.vocab_size)
        found.append(operations.counts)
    assert found[0] == found[1]
    assert found[0]["_varlen_attn"] == 4


def test_long_prompts_are_read_in_blocks_with_the_models_logits():
    model, generator = random_gpt(140, 512, 512), torch.Generator().manual_seed(1)
    capacity = capacity_of(model, num_slots=1, page_size=16, max_len=512, num_pages=40)
    runner = TorchRunner(model, dtype=torch.float32, capacity=capacity, stop_tokens=[])
    tokens = torch.randint(0, 256, (450,), generator=generator).tolist()
    for group in range(2):
        runner.set_table(group, 0, 0, range(1, 33))
    for row in (read(runner, 0, tokens)[0], read(runner, 0, tokens, 190)[1]):
        torch.testing.assert_close(row, expected(model, tokens), rtol=0, atol=2e-5)


def test_pages_that_follow_each_other_are_read_without_a_copy(make_model):
    runner = open_small(make_model())
    pool = runner.pools[0]
    runner.set_table(0, 0, 0, [5, 6, 7, 3, 4])
    assert pool.find(0, 1, 11).pages is None
    assert pool.find(0, 13, 20).pages is None
    assert pool.find(0, 9, 14).pages is not None
    runner.set_table(0, 0, 3, [8])
    assert pool.find(0, 9, 14).pages is None
    assert pool.find(0, 9, 17).pages is not None
