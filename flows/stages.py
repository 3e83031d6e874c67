"""The table of stages. The flow, the plan, the docs and the tests are derived from it.

Each stage makes one artifact from input artifacts and sections of the configuration. A stage that
continues or evaluates a model has that model as its first input.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Quantity:
    """A number that a stage logs during training, drawn as a curve."""

    kind: Literal["step", "eval"]  # kind of the events that have it
    name: str
    title: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the pipeline."""

    name: str
    makes: str
    entry: str  # module with `run(job)`
    compute: Literal["cpu", "gpu"]
    inputs: tuple["Stage", ...] = ()
    config: tuple[str, ...] = ()  # sections of RunConfig that decide the result
    tasks: str | None = None  # the field of RunConfig naming the tasks that it imports by name
    text: str | None = None  # the field of RunConfig naming the text source that it imports by name
    grades: bool = False  # it also grades answers to them
    format: int = 1  # of its files; part of the fingerprint: raise it when their meaning changes
    reads_records: bool = False  # it also reads its inputs' manifests and logs
    model: Literal["base", "chat"] | None = None  # the kind of model that it makes
    label: str = ""  # of its training, in tables for people
    curves: tuple[Quantity, ...] = ()


SHARDS = Stage(
    name="shards",
    makes="parquet files of documents, the last one for validation",
    config=("seed", "shards"),
    entry="nanochat_core.data.shards",
    compute="cpu",
    text="shards.source",
)
TASK_DATA = Stage(
    name="task_data",
    makes="every task's examples, train and test",
    config=("seed", "task_data"),
    entry="nanochat_core.data.conversations.task_data",
    compute="cpu",
    tasks="task_data.datasets",
)
TOKENIZER = Stage(
    name="tokenizer",
    makes="a byte-level BPE tokenizer",
    inputs=(SHARDS,),
    config=("tokenizer",),
    entry="nanochat_core.train.tokenizer",
    compute="cpu",
)
TOKENS = Stage(
    name="tokens",
    makes="token ids and document lengths of every shard",
    inputs=(SHARDS, TOKENIZER),
    entry="nanochat_core.data.tokens",
    compute="cpu",
)
ROWS = Stage(
    name="rows",
    makes="packed training sequences",
    inputs=(TOKENS,),
    config=("rows",),
    entry="nanochat_core.data.rows",
    compute="cpu",
)
PRETRAIN = Stage(
    name="pretrain",
    makes="a base model",
    inputs=(ROWS, TOKENIZER),
    config=("seed", "numerics", "model", "optimizer", "pretrain"),
    entry="nanochat_core.train.pretrain",
    compute="gpu",
    model="base",
    label="pretraining",
    curves=(
        Quantity("step", "loss", "Pretraining loss", "nats per token"),
        Quantity("eval", "val_bpb", "Pretraining val_bpb", "bits per byte of held-out text"),
    ),
)
BASE_EVAL = Stage(
    name="base_eval",
    makes="scores and samples of the base model",
    inputs=(PRETRAIN, ROWS, TASK_DATA),
    config=("base_eval",),
    entry="nanochat_core.evaluate.base",
    compute="gpu",
    format=2,
)
MIDTRAIN = Stage(
    name="midtrain",
    makes="a model that knows the form of conversations",
    inputs=(PRETRAIN, TASK_DATA),
    config=("seed", "optimizer", "midtrain"),
    entry="nanochat_core.train.midtrain",
    compute="gpu",
    model="chat",
    label="midtraining",
    curves=(Quantity("step", "loss", "Midtraining loss", "nats per token of the assistant"),),
)
SFT = Stage(
    name="sft",
    makes="a chat model",
    inputs=(MIDTRAIN, TASK_DATA),
    config=("seed", "optimizer", "sft"),
    entry="nanochat_core.train.sft",
    compute="gpu",
    model="chat",
    label="SFT",
    curves=(Quantity("step", "loss", "SFT loss", "nats per token of the assistant"),),
)
RL = Stage(
    name="rl",
    makes="a chat model, reinforced on a task it can check",
    inputs=(SFT, TASK_DATA),
    config=("seed", "optimizer", "rl"),
    entry="nanochat_core.train.rl",
    compute="gpu",
    tasks="rl.task",
    grades=True,
    model="chat",
    label="RL",
    curves=(
        Quantity("step", "reward", "RL reward", "mean over the answers of a step"),
        Quantity("eval", "pass_at_1", "RL pass@1", "of held-out questions"),
    ),
)


def _chat_eval(model: Stage) -> Stage:
    return Stage(
        name=f"chat_eval_{model.name}",
        makes=f"scores and answers of the model after {model.name}",
        inputs=(model, TASK_DATA),
        config=("chat_eval",),
        entry="nanochat_core.evaluate.chat",
        compute="gpu",
        tasks="chat_eval.tasks",
        grades=True,
        format=2,
    )


# A model is trained further than those before it: the last one that a run has is its best.
_TABLE = (SHARDS, TASK_DATA, TOKENIZER, TOKENS, ROWS, PRETRAIN, BASE_EVAL, MIDTRAIN, SFT, RL)
MODELS = tuple(stage for stage in _TABLE if stage.model)
CHAT_MODELS = tuple(stage for stage in MODELS if stage.model == "chat")
CHAT_EVALS = tuple(map(_chat_eval, CHAT_MODELS))
EVALUATORS = {stage.inputs[0].name: stage for stage in (BASE_EVAL, *CHAT_EVALS)}
REPORT = Stage(
    name="report",
    makes="the report card",
    inputs=(*_TABLE, *CHAT_EVALS),
    entry="flows.report.stage",
    compute="cpu",
    reads_records=True,
)

STAGES: tuple[Stage, ...] = (*REPORT.inputs, REPORT)


def stage_named(name: str) -> Stage:
    """Return the stage called `name`. Raises KeyError: callers validate user input first."""
    return {stage.name: stage for stage in STAGES}[name]


def in_order(names: Iterable[str]) -> list[str]:
    """Return names of stages in the table's order, then those that the table no longer has."""
    found = set(names)
    known = [stage.name for stage in STAGES if stage.name in found]
    return known + sorted(found - set(known))


def curves_of(name: str) -> tuple[Quantity, ...]:
    """Return the curves of the stage called `name`; none if there is no such stage."""
    return next((stage.curves for stage in STAGES if stage.name == name), ())


def stages_to_redo(
    stages: Sequence[Stage], *, force: Iterable[str], from_stage: str | None
) -> frozenset[str]:
    """Return the names of the forced stages, of `from_stage`, and of all stages after it."""
    after = {from_stage} if from_stage else set[str]()
    for stage in stages:  # inputs come before the stages that read them, so one pass is enough
        if after & {source.name for source in stage.inputs}:
            after.add(stage.name)
    return frozenset(force) | after
