"""Prefill passes in plain torch: one call of attention a layer, or blocks; without a GPU."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat_core.engine.runners.prefill_attention import difference, find_varlen, varlen
from nanochat_core.engine.runners.torch_runner import TorchRunner
from nanochat_core.model.gpt import GPT
from nanochat_core.scaling import model_for_depth, numerics
from tests.support.nanochat_core.engine.native_models import chunk, read
from tests.support.nanochat_core.engine.torch_slots import expected, open_small, plain_varlen
from tests.support.nanochat_core.random_gpt import capacity_of, random_gpt

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


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
        for group in range(len(runner.groups)):
            runner.set_table(group, slot, 0, range(1 + 8 * slot, 9 + 8 * slot))
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
