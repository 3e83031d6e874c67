"""What torch.compile compiles of a model, and how often."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanochat_core.evaluate.bits_per_byte import row_losses
from nanochat_core.model.gpt import GPT
from nanochat_core.model.trees import PackedTree, Tree
from nanochat_core.optim.sharded import Optimizer
from nanochat_core.runtime.hardware.distributed import ALONE
from nanochat_core.scaling import numerics, run_for_depth
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.train.chat import mean_loss
from nanochat_core.train.loop.fixed_text import fixed_text_loss
from tests.support.nanochat_core.optim.ranks import add_gradients, gradients_of
from tests.support.nanochat_core.random_gpt import shape_of

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Dynamo detected a call"),  # of a cached mask
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute"
    ),  # dynamo's own look at a block's input
]
CPU = torch.device("cpu")
CONFIG = shape_of(8, 32, width=128, num_heads=2, vocab_size=256)


@pytest.fixture(params=[False, True], ids=["whole", "by block"])
def by_block(request):
    """Return whether passes are compiled block by block."""
    return request.param


@pytest.fixture
def counters(monkeypatch):
    """Dynamo's, of passes that are traced alone: generating code would take most of the time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def make_gpt(config=CONFIG, precision="fp32"):
    model = GPT(config, numerics(precision))
    model.init_weights(1)
    return model


def test_passes_of_one_shape_are_compiled_once(counters, by_block):
    # Four blocks of two kinds, by window and value embeddings.
    config = replace(CONFIG, depth=4, windows=(8, 32, 8, 32))
    model = make_gpt(config)
    model.compile_passes(by_block=by_block)
    graphs = 4 if by_block else 1  # two kinds, the beginning and the end
    tokens = torch.randint(CONFIG.vocab_size, (2, 17))
    for _ in range(3):
        with torch.no_grad():
            model.summed_loss(tokens[:, :-1], tokens[:, 1:])
    assert counters["stats"]["unique_graphs"] == graphs
    for _ in range(3):
        model.summed_loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert counters["stats"]["unique_graphs"] == 2 * graphs
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore")  # what torch imports for its compiler has some
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_only_autotune_has_products_timed_and_in_bf16_also_fused_ones(monkeypatch, precision):
    asked = []
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda pass_, **how: asked.append(how) or pass_)
    model = make_gpt(precision=precision)
    model.compile_passes()
    model.compile_passes(autotune=True)
    plain, timed = (how["options"] for how in asked)
    assert plain is None
    assert timed["max_autotune"]
    assert timed["triton.enable_persistent_tma_matmul"]
    assert timed.get("loop_ordering_after_fusion", True) is (precision == "fp8")
    compile_(len, options=timed)  # raises where torch does not know an option


# Two of four pairs: each evaluation once, and each way to compile.
@pytest.mark.parametrize(("by_block", "of_chat"), [(False, False), (True, True)])
def test_a_smaller_last_batch_of_an_evaluation_is_not_compiled_for_itself(
    counters, by_block, of_chat
):
    model = make_gpt()
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    taken = np.random.default_rng(1).integers(256, size=(21, 17), dtype=np.int64)
    rows = SimpleNamespace(num_rows=21, sequence_len=16, take=lambda at: taken[at])
    masks = np.random.default_rng(2).integers(2, size=taken.shape, dtype=np.uint8)
    talks = SimpleNamespace(tokens=taken, take=lambda at: (taken[at], masks[at]))

    def losses():
        if of_chat:
            return np.array(mean_loss(model, talks, 8, ALONE))
        return row_losses(
            model, rows, np.ones(256, np.int32), num_tokens=21 * 16, batch_size=8, world=ALONE
        )

    expected = losses()
    model.compile_passes(by_block=by_block)
    assert losses() == pytest.approx(expected, rel=1e-5)
    assert counters["stats"]["unique_graphs"] == (4 if by_block else 1)


def test_nor_is_that_of_a_step(counters, by_block):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CONFIG.vocab_size, (5, 17), generator=generator)
    mask = torch.randint(2, (5, 17), generator=generator)
    found = []
    for is_compiled in (False, True):
        model = make_gpt()
        optimizer = Optimizer(model, run_for_depth(2).optimizer, precision="fp32", world=ALONE)
        if is_compiled:
            model.compile_passes(by_block=by_block)
        add_gradients(model, optimizer, tokens, mask, device_batch_size=2)
        graphs = 4 if by_block else 1
        assert counters["stats"]["unique_graphs"] == (graphs if is_compiled else 0)
        found.append({name: g.clone() for name, g in gradients_of(optimizer).items()})
    assert found[0].keys() == dict(model.named_parameters()).keys()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6)


def test_the_loss_on_the_fixed_text_and_trees_compile_nothing(counters, by_block):
    tokenizer = Tokenizer({bytes([i]): i for i in range(256)})
    pack = PackedTree([Tree(trunk=[1, 2, 3], branches=((4,), (5, 6)), rows=[2, 5])], CPU)
    model = make_gpt(replace(CONFIG, vocab_size=tokenizer.vocab_size))
    plain = fixed_text_loss(model, tokenizer)
    model.compile_passes(by_block=by_block)
    assert fixed_text_loss(model, tokenizer) == plain > 0
    assert pack.read(model).shape == (2, CONFIG.width)
    assert not counters["stats"]
    tokens = torch.randint(CONFIG.vocab_size, (2, 17))
    model.summed_loss(tokens[:, :-1], tokens[:, 1:])
    graphs = 4 if by_block else 1
    assert counters["stats"]["unique_graphs"] == graphs  # passes after it are compiled
