"""The configuration of a run: one tree of plain values that decide what it produces.

Every value is resolved (no -1, no "auto"): the plan, the fingerprints and the cost are computed
from this tree alone. Values come from `scaling.run_for_depth` and the profiles. Only a field that
was added later has a default (see `Section`), so a value cannot be forgotten. Where and how fast a
run executes is `infra.placement`.
"""

import re
from dataclasses import dataclass, field

from nanochat_core.errors import ConfigError
from nanochat_core.section import (
    Section,
    check_bounds,
    check_choices,
    check_counts,
    unescaped,
    within,
)

MAX_WIDTH = 2**16  # more than any model needs; the kernels index with 32 bits
# Integers that may be 0; every other one must be at least 1.
_MAY_BE_ZERO = (
    *("seed", "warmup_steps", "momentum_warmup_steps", "top_k", "eval_examples", "skip"),
    *("num_train", "num_test"),
)


@dataclass(frozen=True, kw_only=True)
class NumericsConfig(Section):
    """Every constant of the arithmetic that changed between nanochat's eras, and the precision."""

    precision: str  # "fp32", "bf16" or "fp8": the dtype of activations and matrix products
    fp8_scales: str = "amax"  # "amax", or "bound" where one is known: see model/fp8.py
    fp8_sums: str = "exact"  # of gradients' products in fp32; "fast": in fewer bits
    rotary_base: float = within(1.0, 1e12)
    rotary_precision: str  # "compute" (as `precision`) or "bf16": the dtype of the rotary tables
    qk_scale: float = within(1e-6, 1e6)  # both q and k are multiplied by it after QK-norm
    softcap: float = within(1e-3, 30.0)  # logits = softcap * tanh(logits / softcap)
    gate_scale: float = within(-1e6, 1e6)  # the value-embedding gate is gate_scale * sigmoid(...)
    gate_channels: int = within(1, MAX_WIDTH)  # the gate reads so many, from the first on
    smear_channels: int = within(1, MAX_WIDTH)
    norm_eps: float = within(0.0, 1.0)
    # Initial weights: the embedding's standard deviation, c_fc's bound as a share of the other
    # matrices', and the per-layer scalars, evenly spaced from the first layer to the last.
    init_embedding_std: float = within(0.0, 1e3, default=0.8)
    init_c_fc_bound: float = within(0.0, 1e3, default=0.4)
    init_resid_first: float = within(-1e3, 1e3, default=1.15)
    init_resid_last: float = within(-1e3, 1e3, default=1.05)
    init_x0_first: float = within(-1e3, 1e3, default=0.20)
    init_x0_last: float = within(-1e3, 1e3, default=0.05)

    def __post_init__(self) -> None:
        check_bounds("numerics", self)
        if self.precision == "fp16":
            raise ConfigError(
                "numerics.precision is 'fp16', which would lose small gradients: they need loss "
                "scaling, and the recipe has none",
                hint="take bf16, which has the range of fp32",
            )
        check_choices(
            "numerics",
            self,
            precision=("fp32", "bf16", "fp8"),
            fp8_scales=("amax", "bound"),
            fp8_sums=("exact", "fast"),
            rotary_precision=("compute", "bf16"),
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The shape of the transformer."""

    depth: int = within(1, 1024)
    width: int = within(2, MAX_WIDTH)
    num_heads: int = within(1, MAX_WIDTH)
    num_kv_heads: int = within(1, MAX_WIDTH)
    sequence_len: int = within(1, 2**20)
    vocab_size: int = within(1, 2**20)
    windows: tuple[int, ...] = within(0, 2**21)  # per layer: keys left of a query that it sees
    # Parts that came with nanochat's eras; one that is absent has no parameters.
    residual_scalars: bool = True  # resid_lambdas and x0_lambdas
    value_embeds: bool = True  # and their gates, on every second layer
    smear: bool = True
    backout: bool = True

    def __post_init__(self) -> None:
        check_bounds("model", self)
        if self.width % self.num_heads:
            raise ConfigError(
                f"model.width {self.width} is not a multiple of num_heads {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        # Rotary positions rotate pairs of channels.
        if (channels := self.width // self.num_heads) % 2:
            raise ConfigError(
                f"model.width {self.width} over num_heads {self.num_heads} is {channels}, an odd "
                "number: rotary needs an even one"
            )
        if len(self.windows) != self.depth:
            raise ConfigError(
                f"model.windows has {len(self.windows)} entries for depth {self.depth}"
            )


def check_channels(model: ModelConfig, numerics: NumericsConfig) -> None:
    """Raise ConfigError if a gate reads more channels than the model is wide."""
    for name, is_used in (("smear_channels", model.smear), ("gate_channels", model.value_embeds)):
        if is_used and (channels := getattr(numerics, name)) > model.width:
            raise ConfigError(f"numerics.{name} {channels} is more than model.width {model.width}")


@dataclass(frozen=True, kw_only=True)
class ShardsConfig(Section):
    """The source of pretraining text. The last shard is validation."""

    source: str  # "pydocs" | "local" | "hub" | "s3" | "climbmix" | "fineweb-edu"
    # Source "local": a folder of text files. "hub": owner/name, or owner/name/FILES.
    # "s3": bucket/prefix, or bucket/prefix/FILES
    path: str | None
    num_shards: int  # training shards, without the validation shard
    snapshot: tuple[str, ...]  # pydocs: "python==VERSION"; a folder or bucket: its state
    revision: str | None  # of a hub dataset
    column: str | None = None  # of the text in .parquet and .jsonl; None means "text"
    separator: str | None = None  # of documents in a .txt; None means a file is one

    def __post_init__(self) -> None:
        object.__setattr__(self, "separator", self.separator and unescaped(self.separator))


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Section):
    """Byte-level BPE, trained on the shards."""

    vocab_size: int
    max_chars: int  # characters of text to train on
    document_cap: int  # at most this many characters of one document
    pattern: str = "nanochat"  # splits text; or "gpt4", or "multilingual" for scripts with marks

    def __post_init__(self) -> None:
        check_choices("tokenizer", self, pattern=("nanochat", "gpt4", "multilingual"))


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(Section):
    """One task's data, or conversations from a user's file, as `task_data` prepares it."""

    name: str  # of a task; with `path` any name
    grade: int  # difficulty if the task has several; 1 is the easiest
    num_train: int | None  # the first so many examples; None means all
    num_test: int | None
    path: str | None = field(default=None, metadata={"identity": False})  # JSONL of messages
    snapshot: str | None = None  # sha256 of the file at `path`
    revision: str | None = None  # None means the one in tasks/

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", self.name):
            raise ConfigError(
                f"a dataset is called '{self.name}'",
                hint="its files are stored under that name: small letters, digits, _ and -",
            )


@dataclass(frozen=True, kw_only=True)
class TaskDataConfig(Section):
    """Every dataset that a later stage reads."""

    datasets: tuple[DatasetConfig, ...]
    core_bundle: str | None = None  # URL of the CORE metric's data
    core_bundle_sha256: str | None = None  # None means unknown

    def __post_init__(self) -> None:
        names = [dataset.name for dataset in self.datasets]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"task_data.datasets names '{name}' {names.count(name)} times")
        if "core" in names and self.core_bundle is not None:
            raise ConfigError("a dataset is called 'core', as the CORE metric's data is")


@dataclass(frozen=True, kw_only=True)
class RowsConfig(Section):
    """The packing of documents into rows."""

    policy: str  # "default" or "nanochat"
    sequence_len: int
    buffer_documents: int  # best-fit chooses from this many documents


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """Learning rate and Muon momentum as functions of the step."""

    warmup_steps: int
    warmdown_fraction: float  # of num_steps, at the end
    final_lr_fraction: float
    momentum_start: float
    momentum_peak: float
    momentum_end: float
    momentum_warmup_steps: int


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Learning rates, which include all scale factors (see scaling.py), and optimizer constants."""

    muon_lr: float
    muon_weight_decay: float  # decayed by a cosine over the run in pretraining; 0 afterwards
    lm_head_lr: float
    embedding_lr: float
    value_embed_lr: float
    residual_lr: float
    x0_lr: float
    smear_lr: float
    muon: str = "polar_express"  # or January's "newton_schulz"
    grad_clip: float | None = None  # of the global norm; pretrain only
    lm_head_beta2: float = 0.96
    lm_head_weight_decay: float = 0.01
    embedding_beta2: float = 0.995
    embedding_weight_decay: float = 0.001

    def __post_init__(self) -> None:
        check_choices("optimizer", self, muon=("polar_express", "newton_schulz"))
        if self.muon == "newton_schulz" and self.muon_weight_decay:
            raise ConfigError(
                f"optimizer.muon_weight_decay is {self.muon_weight_decay}, and newton_schulz "
                "decays nothing",
                hint="set it to 0.0",
            )
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ConfigError(
                f"optimizer.grad_clip is {self.grad_clip}, expected more than 0",
                hint="null clips nothing",
            )


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Section):
    """The base model's training."""

    num_steps: int
    total_batch_size: int  # tokens per step over all devices
    schedule: ScheduleConfig
    eval_tokens: int  # of the validation shard, for bits per byte
    lr_fraction: float = 1.0  # of the optimizer section's learning rates


@dataclass(frozen=True, kw_only=True)
class BaseEvalConfig(Section):
    """The evaluation of the base model."""

    eval_tokens: int
    prompts: tuple[str, ...]  # each is continued greedily
    max_new_tokens: int
    core_max_per_task: int | None = None  # examples; None means all


@dataclass(frozen=True, kw_only=True)
class MixtureEntry(Section):
    """A task's training examples inside a mixture."""

    task: str
    num_examples: int | None  # so many of the training split; None means all that are left
    epochs: int
    skip: int = 0  # examples at the beginning of the split, such as those of an earlier stage


@dataclass(frozen=True, kw_only=True)
class ChatTrainConfig(Section):
    """Midtraining and SFT: training on rendered conversations."""

    mixture: tuple[MixtureEntry, ...]
    num_epochs: int
    total_batch_size: int  # tokens per step, padding included
    lr_fraction: float  # of the optimizer section's learning rates
    schedule: ScheduleConfig
    eval_examples: int  # held-out conversations for the validation loss


@dataclass(frozen=True, kw_only=True)
class RLConfig(Section):
    """Reinforcement learning on one task (simplified GRPO)."""

    task: str
    num_steps: int
    examples_per_step: int
    samples_per_example: int
    max_new_tokens: int
    temperature: float
    top_k: int
    lr_fraction: float
    eval_examples: int
    # Options that nanochat lacks; their objective is in train/policy.py.
    updates_per_batch: int = 1  # optimizer steps per batch of answers
    clip: float | None = None  # PPO's: limits the ratio to 1 +- clip
    kl_weight: float = 0.0  # of the divergence from the SFT model
    baseline: str = "group_mean"  # or "leave_one_out"
    drop_equal_groups: bool = False  # skip groups of equal rewards
    eval_samples: int = 1  # 1: greedy accuracy; else pass@1..n
    rollout_precision: str = "model"  # or "bf16", "int8"

    def __post_init__(self) -> None:
        check_choices(
            "rl",
            self,
            baseline=("group_mean", "leave_one_out"),
            rollout_precision=("model", "bf16", "int8"),
        )
        if self.samples_per_example < 2:
            raise ConfigError(
                f"rl.samples_per_example is {self.samples_per_example}, expected at least 2",
                hint="an answer's advantage is relative to the others of its group",
            )
        if self.clip is not None and not 0 < self.clip < 1:
            raise ConfigError(
                f"rl.clip is {self.clip}, expected between 0 and 1", hint="null clips nothing"
            )
        if self.updates_per_batch > 1 and self.clip is None:
            raise ConfigError(
                f"rl.updates_per_batch is {self.updates_per_batch} and rl.clip is null",
                hint="after its first update a batch is another policy's: set rl.clip=0.2",
            )
        if self.kl_weight < 0:
            raise ConfigError(f"rl.kl_weight is {self.kl_weight}, expected at least 0")


@dataclass(frozen=True, kw_only=True)
class EvalTaskConfig(Section):
    """One task of the chat evaluation."""

    name: str
    max_examples: int
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class ChatEvalConfig(Section):
    """The evaluation of chat models: greedy answers, graded by each task."""

    tasks: tuple[EvalTaskConfig, ...]
    prompts: tuple[str, ...]  # shown side by side in the report


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Everything that decides what a run produces."""

    seed: int
    numerics: NumericsConfig
    model: ModelConfig
    shards: ShardsConfig
    task_data: TaskDataConfig
    tokenizer: TokenizerConfig
    rows: RowsConfig
    optimizer: OptimizerConfig
    pretrain: PretrainConfig
    base_eval: BaseEvalConfig
    midtrain: ChatTrainConfig
    sft: ChatTrainConfig
    rl: RLConfig
    chat_eval: ChatEvalConfig

    def __post_init__(self) -> None:
        if self.model.vocab_size != self.tokenizer.vocab_size:
            raise ConfigError(
                f"model.vocab_size {self.model.vocab_size} differs from "
                f"tokenizer.vocab_size {self.tokenizer.vocab_size}"
            )
        if self.model.sequence_len != self.rows.sequence_len:
            raise ConfigError(
                f"model.sequence_len {self.model.sequence_len} differs from "
                f"rows.sequence_len {self.rows.sequence_len}"
            )
        check_counts("", self, may_be_zero=_MAY_BE_ZERO)
        check_channels(self.model, self.numerics)
        datasets = {dataset.name for dataset in self.task_data.datasets}
        trained = {entry.task for entry in (*self.midtrain.mixture, *self.sft.mixture)}
        # Checked here, so that a plan fails and not a stage, hours after the run's start.
        wanted = {self.rl.task, *trained, *(task.name for task in self.chat_eval.tasks)}
        if missing := sorted(wanted - datasets):
            raise ConfigError(
                f"the task '{missing[0]}' is not among task_data.datasets",
                hint=f"one of: {', '.join(sorted(datasets))}",
            )
        for name, chat in (("midtrain", self.midtrain), ("sft", self.sft)):
            if chat.mixture and not chat.eval_examples:
                raise ConfigError(f"{name}.eval_examples is 0, expected at least 1")
        for name in ("pretrain", "midtrain", "sft"):
            # A step is a whole number of rows.
            if (batch := getattr(self, name).total_batch_size) % self.model.sequence_len:
                length = f"sequence_len {self.model.sequence_len}"
                raise ConfigError(f"{name}.total_batch_size {batch} is not a multiple of {length}")
