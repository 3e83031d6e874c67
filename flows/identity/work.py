"""The work of a stage, from which the time of another build of it is estimated.

Two builds are compared only if their `kind` is equal; their times are then in proportion to
`amount`. A manifest records the work of its stage.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from flows.stages import CHAT_EVALS, Stage
from nanochat_core.config import ChatTrainConfig, RunConfig
from nanochat_core.data.hub.datasets import DATASETS
from nanochat_core.scaling import CHARS_PER_SHARD, flops_per_token


@dataclass(frozen=True, kw_only=True)
class Work:
    """What takes a stage's time."""

    kind: str  # the settings that change the time otherwise than in proportion
    amount: float  # of any unit


_Parts: TypeAlias = tuple[Sequence[Any], float]  # of the kind, and the amount


def measure_work(stage: Stage, run: RunConfig) -> Work:
    """Return the work of `stage` in `run`.

    A stage that the table below lacks is comparable with builds of the same settings alone.
    """
    measure = _MEASURES.get(stage.name)
    if measure is None:
        tree = run.tree()
        parts, amount = [tree["model"], *(tree[section] for section in stage.config)], 1.0
    else:
        parts, amount = measure(run)
    return Work(kind=json.dumps(parts), amount=amount)


def _model(run: RunConfig) -> tuple[str, float]:
    """Return the precision, and the FLOPs of a token."""
    return run.numerics.precision, float(flops_per_token(run.model, run.numerics))


def _text(run: RunConfig) -> _Parts:
    """The characters of the text where they are known; any other text is of its own kind."""
    shards = run.shards
    if shards.source in DATASETS:
        return ["shards"], float(shards.num_shards * CHARS_PER_SHARD)
    return [shards.source, shards.path, shards.revision, *shards.snapshot], 1.0


def _task_data(run: RunConfig) -> _Parts:
    config = run.task_data
    counts = [count for d in config.datasets for count in (d.num_train, d.num_test)]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):  # all examples of a dataset: how many, only its files say
        return [config.canonical()], 1.0
    return [config.core_bundle, *(d.name for d in config.datasets)], float(max(1, sum(known)))


def _tokenizer(run: RunConfig) -> _Parts:
    kind, characters = _text(run)
    config = run.tokenizer
    if run.shards.source in DATASETS:
        return [*kind, config.vocab_size], min(characters, config.max_chars)
    return [*kind, config.vocab_size, config.max_chars], 1.0


def _rows(run: RunConfig) -> _Parts:
    kind, characters = _text(run)
    return [*kind, run.rows.policy], characters


def _pretrain(run: RunConfig) -> _Parts:
    precision, flops = _model(run)
    return [precision], flops * run.pretrain.num_steps * run.pretrain.total_batch_size


def _base_eval(run: RunConfig) -> _Parts:
    precision, flops = _model(run)
    config = run.base_eval
    has_core = run.task_data.core_bundle is not None
    return [precision, has_core, config.core_max_per_task, config.eval_tokens], flops


def _chat_training(run: RunConfig, config: ChatTrainConfig) -> _Parts:
    precision, flops = _model(run)
    mixture = [entry.canonical() for entry in config.mixture]
    tasks = {entry.task for entry in config.mixture if entry.num_examples is None}
    whole = [d.canonical() for d in run.task_data.datasets if d.name in tasks]
    return [precision, mixture, whole], flops * config.num_epochs


def _rl(run: RunConfig) -> _Parts:
    precision, flops = _model(run)
    config = run.rl
    answers = config.num_steps * config.examples_per_step * config.samples_per_example
    kind = [precision, config.task, config.rollout_precision, config.updates_per_batch]
    return kind, flops * answers * config.max_new_tokens


def _chat_eval(run: RunConfig) -> _Parts:
    precision, flops = _model(run)
    return [precision, *(task.canonical() for task in run.chat_eval.tasks)], flops


_MEASURES: Mapping[str, Callable[[RunConfig], _Parts]] = {
    "shards": _text,
    "task_data": _task_data,
    "tokenizer": _tokenizer,
    "tokens": _text,
    "rows": _rows,
    "pretrain": _pretrain,
    "base_eval": _base_eval,
    "midtrain": lambda run: _chat_training(run, run.midtrain),
    "sft": lambda run: _chat_training(run, run.sft),
    "rl": _rl,
    "report": lambda run: ([], 1.0),
    **{stage.name: _chat_eval for stage in CHAT_EVALS},
}
