"""nanochat's recipe of 5 January 2026, its "$100 speedrun": `january_run(depth)`.

Simpler than today's: 20 tokens per parameter, a fixed batch size, learning rates independent of it,
and no weight decay. Other programs can run its models.

Differences from nanochat: rows are packed as everywhere here, whole documents after a bos, instead
of one stream cut anywhere. Midtraining's learning rate of the embedding was 0.2, two thirds of
pretraining's, while a stage here scales all rates by one factor. SFT's step has about as many
tokens as its 32 conversations had, and a row holds several.
"""

import dataclasses
import math

from nanochat_core import scaling
from nanochat_core.config import ModelConfig, OptimizerConfig, RunConfig, ShardsConfig
from nanochat_core.eras import JANUARY_5, numerics, of_era

TOKENS_PER_PARAM = 20
TOTAL_BATCH_SIZE = 2**19
SFT_BATCH_SIZE = 2**14  # 32 conversations of its mixture
GSM8K_QUESTIONS = 7473


def january_model(depth: int, *, sequence_len: int = 2048, vocab_size: int = 65536) -> ModelConfig:
    """Return the shape: width 64 per layer, heads as `num_heads_for` chooses, full attention."""
    width = 64 * depth
    num_heads = num_heads_for(width)
    base = dataclasses.replace(
        scaling.model_for_depth(depth, sequence_len=sequence_len, vocab_size=vocab_size),
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
    )
    return of_era(base, JANUARY_5.first_day, pattern="L")


def num_heads_for(width: int) -> int:
    """Return the divisor of width nearest to width / 128, the larger of two equally near ones."""
    ideal = max(1, round(width / scaling.HEAD_DIM))
    # Odd depths have no heads of exactly 128 channels: depth 11 gets 8 heads of 88.
    divisors = [n for n in range(1, width + 1) if width % n == 0]
    return min(divisors, key=lambda n: (abs(n - ideal), -n))


def january_optimizer(model: ModelConfig) -> OptimizerConfig:
    """Return Muon by Newton-Schulz and AdamW without decay, the gradient clipped at norm 1.

    AdamW's eps is added to the bias-corrected root, as nanochat did on one GPU; on several it was
    added before the correction, which makes no difference at 1e-10.
    """
    width_scale = (model.width / 768) ** -0.5
    return OptimizerConfig(
        muon_lr=0.02,
        muon_weight_decay=0.0,
        lm_head_lr=0.004 * width_scale,
        embedding_lr=0.3 * width_scale,
        value_embed_lr=0.0,  # this and the next three: January's model lacks these parameters
        residual_lr=0.0,
        x0_lr=0.0,
        smear_lr=0.0,
        muon="newton_schulz",
        grad_clip=1.0,
        lm_head_beta2=0.95,
        lm_head_weight_decay=0.0,
        embedding_beta2=0.95,
        embedding_weight_decay=0.0,
    )


def january_run(
    depth: int, *, precision: str = "bf16", sequence_len: int = 2048, vocab_size: int = 65536
) -> RunConfig:
    """Return the whole configuration of a run with `depth` layers, by January's recipe."""
    today = scaling.run_for_depth(
        depth, precision=precision, sequence_len=sequence_len, vocab_size=vocab_size
    )
    model = january_model(depth, sequence_len=sequence_len, vocab_size=vocab_size)
    constants = numerics(precision, era=JANUARY_5.first_day)
    # Of all parameters, embeddings included, unlike today's recipe.
    tokens = TOKENS_PER_PARAM * scaling.num_params(model, constants)
    characters = tokens * scaling.CHARS_PER_TOKEN
    return dataclasses.replace(
        today,
        numerics=constants,
        model=model,
        shards=ShardsConfig(
            source="fineweb-edu",
            path=None,
            num_shards=math.ceil(characters / scaling.CHARS_PER_SHARD),
            snapshot=(),
            revision="main",
        ),
        optimizer=january_optimizer(model),
        pretrain=dataclasses.replace(
            today.pretrain,
            num_steps=tokens // TOTAL_BATCH_SIZE,
            total_batch_size=TOTAL_BATCH_SIZE,
            schedule=scaling.chat_schedule(warmdown_fraction=0.4),
            eval_tokens=20 * 2**19,
        ),
        base_eval=dataclasses.replace(today.base_eval, eval_tokens=20 * 2**19),
        midtrain=dataclasses.replace(
            today.midtrain,
            total_batch_size=TOTAL_BATCH_SIZE,
            schedule=scaling.chat_schedule(warmdown_fraction=0.2),
        ),
        sft=dataclasses.replace(
            today.sft,
            total_batch_size=SFT_BATCH_SIZE,
            lr_fraction=0.02,
            schedule=dataclasses.replace(
                scaling.chat_schedule(warmdown_fraction=1.0),
                momentum_start=0.95,
                momentum_warmup_steps=0,
            ),
        ),
        rl=dataclasses.replace(today.rl, num_steps=GSM8K_QUESTIONS // today.rl.examples_per_step),
    )
