"""The depth dial against nanochat's numbers, and its parameter counts against the real model."""

import pytest

from nanochat_core import scaling
from nanochat_core.model.shape import head_dim, value_embed_layers
from nanochat_core.scaling_january import january_run, num_heads_for

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


def shown(value, like):
    """`value` with as many decimals as the text `like`."""
    decimals = len(like.partition(".")[2])
    return f"{value:.{decimals}f}"


def columns(run, at_8):
    model, rates = run.model, run.optimizer
    tokens = int(12 * scaling.num_scaling_params(model, run.numerics))
    assert run.pretrain.num_steps == tokens // run.pretrain.total_batch_size
    return [
        *(model.width, model.num_heads, len(value_embed_layers(model))),
        scaling.num_params(model, run.numerics) / 1e6,
        scaling.num_scaling_params(model, run.numerics) / 1e6,
        *(tokens / 1e9, run.pretrain.total_batch_size.bit_length() - 1),
        *(run.pretrain.num_steps, at_8.pretrain.num_steps, rates.muon_weight_decay),
        *(rates.lm_head_lr, rates.embedding_lr, rates.value_embed_lr, rates.muon_lr, rates.x0_lr),
        scaling.flops_per_token(model, run.numerics) / 1e9,
    ]


@pytest.mark.parametrize("depth", ROWS)
def test_the_dial_gives_nanochats_numbers(depth):
    run = scaling.run_for_depth(depth)
    found = columns(run, scaling.run_for_depth(depth, tokens_per_param=8))
    expected = [float(text) for text in ROWS[depth]]
    rounded = [float(shown(f, text)) for f, text in zip(found, ROWS[depth], strict=True)]
    assert rounded == expected
    assert run.model.num_kv_heads == run.model.num_heads
    assert run.pretrain.total_batch_size == 2 ** int(ROWS[depth][6])
    assert run.optimizer.smear_lr == 0.2
    assert run.optimizer.residual_lr == pytest.approx(run.optimizer.x0_lr / 100)


def test_windows_are_three_short_and_one_long_and_the_last_is_long():
    assert scaling.model_for_depth(6).windows == (512, 512, 512, 2048, 512, 2048)
    assert scaling.windows_for(3, 256) == (128, 128, 256)
    assert scaling.windows_for(4, 64) == (64, 64, 64, 64)


def test_odd_depths_round_the_width_up_to_whole_heads():
    model = scaling.model_for_depth(5)
    assert (model.width, model.num_heads, head_dim(model)) == (384, 3, 128)


# January's dial. depth: width, heads, params M at 65536 tokens, steps, lr of lm_head and wte
JANUARY = """
 4  256  2   36.7  1400 .006928 .51962
10  640  5  133.0  5075 .004382 .32863
11  704  8  157.7  6015 .004178 .31334
12  768  6  185.6  7080 .004000 .30000
20 1280 10  561.0 21400 .003098 .23238
26 1664 13 1082.0 41275 .002717 .20381
32 2048 16 1879.0 71680 .002449 .18371
"""
JANUARY_ROWS = {int(line.split()[0]): line.split()[1:] for line in JANUARY.strip().splitlines()}


@pytest.mark.parametrize("depth", JANUARY_ROWS)
def test_januarys_dial_gives_its_numbers(depth):
    run = january_run(depth)
    found = [
        run.model.width,
        run.model.num_heads,
        scaling.num_params(run.model, run.numerics) / 1e6,
        run.pretrain.num_steps,
        run.optimizer.lm_head_lr,
        run.optimizer.embedding_lr,
    ]
    row = JANUARY_ROWS[depth]
    rounded = [float(shown(f, text)) for f, text in zip(found, row, strict=True)]
    assert rounded == [float(text) for text in row]
    assert run.model.num_kv_heads == run.model.num_heads
    assert set(run.model.windows) == {run.model.sequence_len}
    assert run.pretrain.total_batch_size == 524_288
    assert run.optimizer.muon_lr == 0.02


def test_heads_are_the_divisor_nearest_to_128_channels():
    """As nanochat sought them: further out by one at a time, the larger first."""
    for width in range(64, 64 * 60, 64):
        ideal = max(1, round(width / 128))
        tried = (n for offset in range(width) for n in (ideal + offset, ideal - offset))
        assert num_heads_for(width) == next(n for n in tried if n > 0 and width % n == 0)
