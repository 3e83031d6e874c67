"""The work of a stage, from which the time of another build of it is estimated.

Two builds are compared only if their `kind` is equal; their times are then in proportion to
`amount`. A manifest records the work of its stage.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flows.stages import Stage
from nanochat_core.config import RunConfig
from nanochat_core.data.hub.datasets import DATASETS
from nanochat_core.scaling import CHARS_PER_SHARD, flops_per_token


@dataclass(frozen=True, kw_only=True)
class Work:
    """What takes a stage's time."""

    kind: str  # the settings that change the time otherwise than in proportion
    amount: float  # of any unit


def measure_work(stage: Stage, run: RunConfig) -> Work:
    """Return the work of `stage` in `run`.

    A stage that has no measure here is comparable with builds of the same settings alone.
    """
    measure = _measure_data if stage.model is None and stage.compute == "cpu" else _measure_model
    kind, amount = measure(stage.name, run) or (
        [run.tree()["model"], *(run.tree()[section] for section in stage.config)],
        1.0,
    )
    return Work(kind=json.dumps(kind), amount=float(amount))


def _measure_data(stage: str, run: RunConfig) -> tuple[Sequence[Any], float] | None:
    """Return kind and amount of a stage that reads text or examples; None if it has no measure."""
    shards, data, characters = run.shards, run.task_data, 1.0
    # The characters of the text where they are known; any other text is of its own kind.
    text: list[Any] = [shards.source, shards.path, shards.revision, *shards.snapshot]
    if is_known := shards.source in DATASETS:
        text, characters = ["shards"], float(shards.num_shards * CHARS_PER_SHARD)
    match stage:
        case "shards" | "tokens":
            return text, characters
        case "rows":
            return [*text, run.rows.policy], characters
        case "tokenizer":
            size, limit = run.tokenizer.vocab_size, run.tokenizer.max_chars
            kind = [*text, size] if is_known else [*text, size, limit]
            return kind, min(characters, limit)
        case "task_data":
            counts = [count for d in data.datasets for count in (d.num_train, d.num_test)]
            known = [count for count in counts if count is not None]
            if len(known) < len(counts):  # all examples of a dataset: how many, only its files say
                return [data.canonical()], 1.0
            return [data.core_bundle, *(d.name for d in data.datasets)], max(1, sum(known))
        case "report":
            return [], 1.0
        case _:
            return None


def _measure_model(stage: str, run: RunConfig) -> tuple[Sequence[Any], float] | None:
    """Return kind and amount of a stage that runs a model; None if it has no measure."""
    precision, flops = run.numerics.precision, flops_per_token(run.model, run.numerics)
    match stage:
        case "pretrain":
            return [precision], flops * run.pretrain.num_steps * run.pretrain.total_batch_size
        case "base_eval":
            has_core, limits = run.task_data.core_bundle is not None, run.base_eval
            return [precision, has_core, limits.core_max_per_task, limits.eval_tokens], flops
        case "midtrain" | "sft":
            config = run.sft if stage == "sft" else run.midtrain
            mixture = [entry.canonical() for entry in config.mixture]
            tasks = {entry.task for entry in config.mixture if entry.num_examples is None}
            whole = [d.canonical() for d in run.task_data.datasets if d.name in tasks]
            return [precision, mixture, whole], flops * config.num_epochs
        case "rl":
            rl = run.rl
            answers = rl.num_steps * rl.examples_per_step * rl.samples_per_example
            kind = [precision, rl.task, rl.rollout_precision, rl.updates_per_batch]
            return kind, flops * answers * rl.max_new_tokens
        case _ if stage.startswith("chat_eval_"):
            return [precision, *(task.canonical() for task in run.chat_eval.tasks)], flops
        case _:
            return None
