"""The recipe: `run_for_depth(depth)` derives every number of a run from the number of layers.

The chain is depth -> width -> parameters -> training tokens -> batch size -> learning rates and
weight decay, by nanochat's rule at each link (constants tuned there at depth 12). All are plain
functions of plain numbers: the plan, the cost and the tests need no torch.
"""

import math

from nanochat_core.config import (
    BaseEvalConfig,
    ChatEvalConfig,
    ChatTrainConfig,
    DatasetConfig,
    EvalTaskConfig,
    MixtureEntry,
    ModelConfig,
    NumericsConfig,
    OptimizerConfig,
    PretrainConfig,
    RLConfig,
    RowsConfig,
    RunConfig,
    ScheduleConfig,
    ShardsConfig,
    TaskDataConfig,
    TokenizerConfig,
)
from nanochat_core.eras import numerics, windows_of
from nanochat_core.errors import ConfigError
from nanochat_core.model.shape import head_dim, padded_vocab_size, value_embed_layers

HEAD_DIM = 128
REFERENCE_DEPTH = 12
REFERENCE_BATCH = 2**19  # tokens per step at the reference depth
BATCH_EXPONENT = 0.383  # batch ~ tokens^0.383, Power Lines, arXiv 2505.13738
CHARS_PER_SHARD = 250_000_000
CHARS_PER_TOKEN = 4.8  # of the 32768-token vocabulary on web text


def model_for_depth(
    depth: int, *, sequence_len: int = 2048, vocab_size: int = 32768
) -> ModelConfig:
    """Return the shape: width 64 per layer, rounded up to whole heads of 128; windows SSSL."""
    width = -(-64 * depth // HEAD_DIM) * HEAD_DIM
    return ModelConfig(
        depth=depth,
        width=width,
        num_heads=width // HEAD_DIM,
        num_kv_heads=width // HEAD_DIM,
        sequence_len=sequence_len,
        vocab_size=vocab_size,
        windows=windows_for(depth, sequence_len),
    )


def windows_for(depth: int, sequence_len: int) -> tuple[int, ...]:
    """Return the keys to the left per layer: three short, one long, repeated; the last is long."""
    return windows_of("SSSL", depth, sequence_len)


def num_matrix_params(model: ModelConfig, constants: NumericsConfig) -> int:
    """Return the parameters inside the blocks: attention, MLP and value-embedding gates."""
    # Attention: Wq and Wo (C, C), Wk and Wv (K D, C). MLP: two matrices of 4 C^2.
    kv_width = model.num_kv_heads * head_dim(model)
    attention = 2 * model.width * model.width + 2 * model.width * kv_width
    gates = len(value_embed_layers(model)) * model.num_kv_heads * constants.gate_channels
    return model.depth * (attention + 8 * model.width * model.width) + gates


def num_lm_head_params(model: ModelConfig) -> int:
    """Return the parameters of the output projection."""
    return padded_vocab_size(model) * model.width


def num_scaling_params(model: ModelConfig, constants: NumericsConfig) -> int:
    """Return the parameters that determine the number of tokens: matrices and lm_head."""
    # Without embeddings, as in nanochat.
    return num_matrix_params(model, constants) + num_lm_head_params(model)


def num_params(model: ModelConfig, constants: NumericsConfig) -> int:
    """Return the number of all parameters: d12 has 286,261,730."""
    embeddings = padded_vocab_size(model) * model.width
    value_embeds = (
        len(value_embed_layers(model))
        * padded_vocab_size(model)
        * model.num_kv_heads
        * head_dim(model)
    )
    scalars = 2 * model.depth * model.residual_scalars + model.backout
    smear = (constants.smear_channels + 1) * model.smear
    return num_scaling_params(model, constants) + embeddings + value_embeds + scalars + smear


def flops_per_token(model: ModelConfig, constants: NumericsConfig) -> int:
    """Return the FLOPs of forward and backward per token, by nanochat's MFU convention."""
    # 6 per parameter (2 forward, 4 backward); attention 12 C per key inside the window.
    attention = sum(12 * model.width * min(w, model.sequence_len) for w in model.windows)
    smear = constants.smear_channels * model.smear
    return 6 * (num_scaling_params(model, constants) + smear) + attention


def batch_for_tokens(tokens: int, reference_tokens: int) -> int:
    """Return tokens per step: the power of two nearest (in log) to the Power Lines batch."""
    ideal = REFERENCE_BATCH * (tokens / reference_tokens) ** BATCH_EXPONENT
    # A power of two, so that it divides into ranks, micro-steps and rows.
    return 2 ** round(math.log2(ideal))


def optimizer_for(
    model: ModelConfig, *, tokens: int, reference_tokens: int, total_batch_size: int
) -> OptimizerConfig:
    """Return learning rates scaled by sqrt(batch), those of AdamW's matrices also by 1/sqrt(width).

    Weight decay keeps the averaging timescale constant in epochs (T_epoch, arXiv 2405.13698).
    """
    # Reference values are those of depth 12: width 768 and 2^19 tokens per step.
    batch_scale = math.sqrt(total_batch_size / REFERENCE_BATCH)
    width_scale = (model.width / 768) ** -0.5
    return OptimizerConfig(
        muon_lr=0.02 * batch_scale,
        muon_weight_decay=0.28 * batch_scale * reference_tokens / tokens,
        lm_head_lr=0.008 * batch_scale * width_scale,
        embedding_lr=0.3 * batch_scale * width_scale,
        value_embed_lr=0.15 * batch_scale * width_scale,
        residual_lr=0.005 * batch_scale,
        x0_lr=0.5 * batch_scale,
        smear_lr=0.2,  # not scaled, as in nanochat
    )


def pretrain_schedule() -> ScheduleConfig:
    """Return the schedule: 40 steps of warmup, hold, linear to 5 % over the last 65 %."""
    return ScheduleConfig(
        warmup_steps=40,
        warmdown_fraction=0.65,
        final_lr_fraction=0.05,
        momentum_start=0.85,
        momentum_peak=0.97,
        momentum_end=0.90,
        momentum_warmup_steps=400,
    )


def chat_schedule(*, warmdown_fraction: float) -> ScheduleConfig:
    """Return the schedule of chat stages: no warmup, hold, then linear to zero."""
    return ScheduleConfig(
        warmup_steps=0,
        warmdown_fraction=warmdown_fraction,
        final_lr_fraction=0.0,
        momentum_start=0.85,
        momentum_peak=0.95,
        momentum_end=0.95,
        momentum_warmup_steps=300,
    )


def run_for_depth(
    depth: int,
    *,
    tokens_per_param: float = 12.0,
    precision: str = "bf16",
    sequence_len: int = 2048,
    vocab_size: int = 32768,
) -> RunConfig:
    """Return the whole configuration of a run with `depth` layers, by nanochat's recipe."""
    model = model_for_depth(depth, sequence_len=sequence_len, vocab_size=vocab_size)
    reference = model_for_depth(REFERENCE_DEPTH, sequence_len=sequence_len, vocab_size=vocab_size)
    constants = numerics(precision)
    # Batch and weight decay scale with the ratio of these to depth 12's tokens.
    tokens = int(tokens_per_param * num_scaling_params(model, constants))
    reference_tokens = int(tokens_per_param * num_scaling_params(reference, constants))
    batch = batch_for_tokens(tokens, reference_tokens)
    # Enough text for one epoch: no document is repeated.
    num_shards = math.ceil(tokens * CHARS_PER_TOKEN / CHARS_PER_SHARD)
    return RunConfig(
        seed=42,
        numerics=constants,
        model=model,
        shards=ShardsConfig(
            source="climbmix", path=None, num_shards=num_shards, snapshot=(), revision="main"
        ),
        task_data=TaskDataConfig(
            datasets=(
                dataset("identity", num_train=1000, num_test=50),
                dataset("simple_spelling", num_train=200_000, num_test=1000),
                dataset("spelling_bee", num_train=80_000, num_test=1000),
                *(dataset(name) for name in PUBLISHED),
            ),
            core_bundle=CORE_BUNDLE,
        ),
        tokenizer=TokenizerConfig(
            vocab_size=vocab_size, max_chars=2_000_000_000, document_cap=10_000
        ),
        rows=RowsConfig(policy="default", sequence_len=sequence_len, buffer_documents=1000),
        optimizer=optimizer_for(
            model, tokens=tokens, reference_tokens=reference_tokens, total_batch_size=batch
        ),
        pretrain=PretrainConfig(
            num_steps=tokens // batch,
            total_batch_size=batch,
            schedule=pretrain_schedule(),
            eval_tokens=80 * 524_288,
        ),
        base_eval=BaseEvalConfig(
            eval_tokens=80 * 524_288,
            prompts=BASE_PROMPTS,
            max_new_tokens=48,
        ),
        midtrain=ChatTrainConfig(
            mixture=open_mixture("midtrain"),
            num_epochs=1,
            total_batch_size=batch,
            lr_fraction=1.0,
            schedule=chat_schedule(warmdown_fraction=0.2),
            eval_examples=1000,
        ),
        # January's second chat stage with today's `lr_fraction`. Today's nanochat has a single chat
        # stage with a mixture 35 times as long; this one is short and follows midtraining, hence
        # two differences. Its rate falls from the first step, as January's did, while today's is
        # held for half of the stage (warmdown 0.5), the part that replaces midtraining. Its batch
        # is at most 2^18 tokens, while today's is the base model's (2^20 at d20), which would leave
        # too few steps; the rates are not scaled down with it. The settings of today's stage are in
        # tests/integration/nanochat_core/train/test_chat_recipes.py.
        sft=ChatTrainConfig(
            mixture=open_mixture("sft"),
            num_epochs=1,
            total_batch_size=min(batch, 2**18),
            lr_fraction=0.8,
            schedule=chat_schedule(warmdown_fraction=1.0),
            eval_examples=1000,
        ),
        rl=RLConfig(
            task="gsm8k",
            num_steps=400,
            examples_per_step=16,
            samples_per_example=16,
            max_new_tokens=256,
            temperature=1.0,
            top_k=50,
            lr_fraction=0.05,
            eval_examples=400,
        ),
        chat_eval=ChatEvalConfig(
            tasks=(
                EvalTaskConfig(name="arc_easy", max_examples=2376, max_new_tokens=8),
                EvalTaskConfig(name="arc_challenge", max_examples=1172, max_new_tokens=8),
                EvalTaskConfig(name="mmlu", max_examples=14_042, max_new_tokens=8),
                EvalTaskConfig(name="gsm8k", max_examples=1319, max_new_tokens=512),
                EvalTaskConfig(name="humaneval", max_examples=164, max_new_tokens=512),
                EvalTaskConfig(name="spelling_bee", max_examples=256, max_new_tokens=512),
            ),
            prompts=CHAT_PROMPTS,
        ),
    )


def dataset(
    name: str, *, grade: int = 1, num_train: int | None = None, num_test: int | None = None
) -> DatasetConfig:
    """Return a task's data section; without numbers all examples of a published dataset."""
    return DatasetConfig(
        name=name,
        grade=grade,
        num_train=num_train,
        num_test=num_test,
    )


def open_mixture(name: str) -> tuple[MixtureEntry, ...]:
    """Return the mixture called `name`, or of the .toml file at that path. Raises ConfigError."""
    # Imported here only: training jobs import this module too, but read no mixture.
    from tasks.base import TaskError
    from tasks.mixtures.mixture_files import read_mixture
    from tasks.user_files import FileFault

    try:
        shares = read_mixture(name)
    except FileFault as error:
        raise ConfigError(str(error), hint=error.hint) from error
    except TaskError as error:
        raise ConfigError(str(error), hint="see tasks/mixtures for what one looks like") from error
    return tuple(MixtureEntry(task=s.task, num_examples=s.rows, epochs=s.epochs) for s in shares)


# The datasets of nanochat's chat training and evaluation.
PUBLISHED = ("smoltalk", "mmlu", "gsm8k", "arc_easy", "arc_challenge", "humaneval")
CORE_BUNDLE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
BASE_PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)
CHAT_PROMPTS = (
    "Hello! Who are you?",
    "How do you spell 'apple'?",
    "Tom has 7 apples and finds 5 more. How many apples does Tom have?",
)
