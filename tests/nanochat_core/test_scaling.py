"""The depth dial against nanochat's numbers, and its parameter counts against the real model."""

import pytest

from nanochat_core import scaling
from nanochat_core.config import RunConfig

# depth: width, heads, value embeddings, params M, scaling params M, tokens B, log2 batch, steps at
# 12 and at 8 tokens per parameter, weight decay, lr of lm_head, wte, value embeddings, Muon, x0,
# GFLOPs per token
TABLE = """
 4  256  2  2   36.7   11.5  0.138 18   528  352 1.88990 .009798 .36742 .18371 .01414  .3536  0.080
 8  512  4  4  125.8   41.9  0.503 18  1920 1280  .51972 .006928 .25981 .12990 .01414  .3536  0.296
12  768  6  6  286.3  110.1  1.321 19  2520 1680  .28000 .008000 .30000 .15000 .02000  .5000  0.760
16 1024  8  8  536.9  234.9  2.819 19  5376 3584  .13125 .006928 .25981 .12990 .02000  .5000  1.585
20 1280 10 10  896.5  435.2  5.222 20  4980 3320  .10019 .008764 .32863 .16432 .02828  .7071  2.886
22 1408 11 11 1123.2  569.5  6.834 20  6517 4345  .07655 .008356 .31334 .15667 .02828  .7071  3.763
24 1536 12 12 1384.1  729.8  8.758 20  8352 5568  .05974 .008000 .30000 .15000 .02828  .7071  4.775
26 1664 13 13 1681.8  918.4 11.021 20 10510 7007  .04747 .007686 .28823 .14412 .02828  .7071  5.991
28 1792 14 14 2018.5 1137.7 13.652 20 13020 8680  .03832 .007407 .27775 .13887 .02828  .7071  7.366
32 2048 16 16 2818.6 1677.7 20.133 21  9600 6400  .03675 .009798 .36742 .18371 .04000 1.0000 10.771
"""
ROWS = {int(line.split()[0]): line.split()[1:] for line in TABLE.strip().splitlines()}


def shown(value: float, like: str) -> str:
    """`value` with as many decimals as the text `like`."""
    decimals = len(like.partition(".")[2])
    return f"{value:.{decimals}f}"


def columns(run: RunConfig, at_8: RunConfig) -> list[float]:
    model, rates = run.model, run.optimizer
    tokens = int(12 * scaling.num_scaling_params(model, run.numerics))
    assert run.pretrain.num_steps == tokens // run.pretrain.total_batch_size
    return [
        model.width,
        model.num_heads,
        len(model.value_embed_layers),
        scaling.num_params(model, run.numerics) / 1e6,
        scaling.num_scaling_params(model, run.numerics) / 1e6,
        tokens / 1e9,
        run.pretrain.total_batch_size.bit_length() - 1,
        run.pretrain.num_steps,
        at_8.pretrain.num_steps,
        rates.muon_weight_decay,
        rates.lm_head_lr,
        rates.embedding_lr,
        rates.value_embed_lr,
        rates.muon_lr,
        rates.x0_lr,
        scaling.flops_per_token(model, run.numerics) / 1e9,
    ]


@pytest.mark.parametrize("depth", ROWS)
def test_the_dial_gives_nanochats_numbers(depth: int) -> None:
    run = scaling.run_for_depth(depth)
    found = columns(run, scaling.run_for_depth(depth, tokens_per_param=8))
    expected = [float(text) for text in ROWS[depth]]
    rounded = [float(shown(f, text)) for f, text in zip(found, ROWS[depth], strict=True)]
    assert rounded == expected
    assert run.model.num_kv_heads == run.model.num_heads
    assert run.pretrain.total_batch_size == 2 ** int(ROWS[depth][6])
    assert run.optimizer.smear_lr == 0.2
    assert run.optimizer.residual_lr == pytest.approx(run.optimizer.x0_lr / 100)


def test_windows_are_three_short_and_one_long_and_the_last_is_long() -> None:
    assert scaling.model_for_depth(6).windows == (512, 512, 512, 2048, 512, 2048)
    assert scaling.windows_for(3, 256) == (128, 128, 256)
    assert scaling.windows_for(4, 64) == (64, 64, 64, 64)


def test_odd_depths_round_the_width_up_to_whole_heads() -> None:
    model = scaling.model_for_depth(5)
    assert (model.width, model.num_heads, model.head_dim) == (384, 3, 128)


@pytest.mark.torch
@pytest.mark.parametrize("depth", [*ROWS, 1, 3, 11])
def test_counted_parameters_are_the_models_own(depth: int) -> None:
    import torch

    from nanochat_core.model.gpt import GPT

    config = scaling.model_for_depth(depth)
    constants = scaling.numerics("bf16")
    with torch.device("meta"):
        model = GPT(config, constants)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(sizes.values()) == scaling.num_params(config, constants)
    inside = sum(size for name, size in sizes.items() if name.startswith("transformer.h."))
    assert inside == scaling.num_matrix_params(config, constants)
    assert sizes["lm_head.weight"] == scaling.num_lm_head_params(config)
    if depth == 12:
        assert (len(sizes), sum(sizes.values())) == (91, 286_261_730)
