"""Stage `task_data`: every dataset that a later stage trains or is judged on, as JSONL files.

    output/{task}/{train,test}.jsonl   one conversation a line, see tasks/base.py
    output/task_data.json              {"format", "datasets": {task: {"grade", "train", "test"}}}

"train" and "test" in the second are the numbers of examples. They may be below those of the config
where a task's dataset is a small file (identity): that gives what it has.
"""

from pathlib import Path
from typing import Any

from nanochat_core.config import DatasetConfig, TaskDataConfig
from nanochat_core.errors import DataError
from nanochat_core.job import Job, write_json
from nanochat_core.runtime.seeding import seed_for
from tasks.base import SPLITS, Conversation, TaskError, prompt_key
from tasks.files import write_examples
from tasks.registry import generate, is_gradable

FORMAT = 1


def run(job: Job) -> dict[str, Any]:
    """Write every dataset of the config. Raises DataError for one that cannot be made."""
    config = TaskDataConfig.from_tree(job.config["task_data"])
    names = [dataset.name for dataset in config.datasets]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"task_data.datasets names '{name}' {names.count(name)} times")
    datasets: dict[str, dict[str, int]] = {}
    for dataset in config.datasets:
        counts = write_dataset(dataset, job.output / dataset.name, seed=job.config["seed"])
        datasets[dataset.name] = {"grade": dataset.grade, **counts}
    write_json(job.output / "task_data.json", {"format": FORMAT, "datasets": datasets})
    metrics = {
        f"{name}_{split}": counts[split] for name, counts in datasets.items() for split in SPLITS
    }
    return {**metrics, "examples": sum(metrics.values())}


def write_dataset(dataset: DatasetConfig, directory: Path, *, seed: int) -> dict[str, int]:
    """Write both splits into `directory`; returns split -> number of examples.

    Raises DataError when the task cannot give what is asked for, or when a test example of a task
    with grading asks what a train example asks.
    """
    wanted = {"train": dataset.num_train or 0, "test": dataset.num_test or 0}
    try:
        splits = {
            split: list(
                generate(
                    dataset.name,
                    split,
                    wanted[split],
                    grade=dataset.grade,
                    seed=seed_for(seed, "task_data", dataset.name, split),
                )
            )
            for split in SPLITS
        }
        if is_gradable(dataset.name):
            check_disjoint(dataset.name, splits["train"], splits["test"])
    except TaskError as error:
        raise DataError(
            str(error), hint=f"see the entry '{dataset.name}' of task_data.datasets"
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    return {
        split: write_examples(directory / f"{split}.jsonl", examples)
        for split, examples in splits.items()
    }


def check_disjoint(name: str, train: list[Conversation], test: list[Conversation]) -> None:
    """Raises DataError when a test prompt occurs in training: the score would measure memory."""
    common = {prompt_key(c) for c in train} & {prompt_key(c) for c in test}
    if common:
        raise DataError(
            f"{len(common)} prompts of task '{name}' are in both train and test, "
            f"for example {min(common)!r}"
        )
