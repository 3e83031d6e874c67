"""Texts read as one tree, against each text by itself."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from nanochat_core.eras import ERAS, HEAD, numerics, of_era
from nanochat_core.model.gpt import GPT
from nanochat_core.model.trees import PackedTree, Tree, packs_of
from tests.support.nanochat_core.random_gpt import randomise, shape_of

pytestmark = pytest.mark.torch

VOCAB, WINDOW = 90, 17  # a short window, shorter than most trunks
CPU = torch.device("cpu")


def make_model(era=HEAD, *, depth=3, kv_heads=2, precision="fp32"):
    shape = shape_of(*[128] * depth, num_kv_heads=kv_heads, vocab_size=VOCAB)
    config = of_era(shape, era, pattern="SSSL" if ERAS[era].short_window else "L")
    windows = tuple(WINDOW if layer % 2 == 0 else 128 for layer in range(depth))
    if not ERAS[era].short_window:
        windows = config.windows
    model = GPT(dataclasses.replace(config, windows=windows), numerics(precision, era=era))
    return randomise(model, 1, lambda name, _: 1.0 if "wte" in name else 0.2)


def make_trees(seed=0):
    """Long and short trunks, no branch, one, several, an empty one; longer than sequence_len."""
    rng = np.random.default_rng(seed)
    trees = []
    for length, branches in (
        (40, (3, 5)),
        (1, (7, 0, 2)),
        (60, ()),
        (150, (30, 25, 40)),
        (5, (50,)),
    ):
        parts = [rng.integers(0, VOCAB, n).tolist() for n in (length, *branches)]
        size = sum(map(len, parts))
        rows = [size - 1, *rng.choice(size, size // 8 + 1, replace=False).tolist(), length - 1]
        trees.append(Tree(trunk=parts[0], branches=tuple(parts[1:]), rows=rows))
    return trees


def paths_of(tree):
    """The text that ends in each token of the tree."""
    trunk = list(tree.trunk)
    ends = [trunk[: i + 1] for i in range(len(trunk))]
    branches = ((branch, i) for branch in tree.branches for i in range(len(branch)))
    return ends + [trunk + list(branch[: i + 1]) for branch, i in branches]


def logits_of(model, trees, *, whole):
    pack = PackedTree(trees, CPU)
    attends = pack.attention(model.config.windows, whole=whole)
    hidden = model.forward_tree(pack.tokens, pack.parents, pack.positions, pack.rows, attends)
    softcap = model.numerics.softcap
    return softcap * torch.tanh(model.logits_at(hidden).float() / softcap)


@torch.no_grad()
def alone(model, trees):
    texts = [paths_of(tree)[row] for tree in trees for row in tree.rows]
    return torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])


@pytest.mark.parametrize(
    ("era", "depth", "kv_heads"),
    [*((era, 3, 2) for era in ERAS), (HEAD, 1, 4), (HEAD, 2, 1), (HEAD, 4, 4)],
)
def test_logits_in_a_tree_are_those_of_each_text_alone(era, depth, kv_heads):
    model, trees = make_model(era, depth=depth, kv_heads=kv_heads), make_trees()
    expected = alone(model, trees)
    assert expected.std() > 0.5
    for whole in (False, True):  # tree by tree, and in one mask
        got = logits_of(model, trees, whole=whole)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_in_bf16_up_to_its_rounding():
    model, trees = make_model(precision="bf16"), make_trees()
    off = (logits_of(model, trees, whole=False) - alone(model, trees)).abs()
    assert off.mean() < 0.03
    assert off.max() < 0.5


def test_losses_are_those_of_the_capped_logits():
    model, trees = make_model(), make_trees()
    pack = PackedTree(trees, CPU)
    targets = torch.randint(VOCAB, (len(pack.rows),), generator=torch.Generator().manual_seed(3))
    expected = torch.nn.functional.cross_entropy(alone(model, trees), targets, reduction="none")
    found = model.token_losses_at(pack.read(model), targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_pack_without_rows_of_one_tree_reads_the_others_and_scores_of_some_tokens():
    model, trees = make_model(), make_trees()
    silent = [dataclasses.replace(trees[0], rows=()), *trees[1:]]
    hidden = PackedTree(silent, CPU).read(model)
    expected = alone(model, trees[1:])
    torch.testing.assert_close(logits_of(model, silent, whole=False), expected, rtol=0, atol=1e-5)
    ids = torch.tensor([5, 2, 88])
    torch.testing.assert_close(model.logits_at(hidden, ids), model.logits_at(hidden)[:, ids])


def test_packs_take_neighbours_until_they_are_full():
    rng = np.random.default_rng(4)
    for _ in range(50):
        sizes = rng.integers(1, 40, rng.integers(0, 30)).tolist()
        packs = list(packs_of(sizes, 32))
        assert [*itertools.chain(*packs)] == list(range(len(sizes)))
        for pack, after in itertools.pairwise(packs):
            held = sum(sizes[i] for i in pack)
            assert held <= 32 or len(pack) == 1
            assert held + sizes[after.start] > 32
