"""Stage `task_data`: every dataset that a later stage trains or is evaluated on, as JSONL files.

    output/{name}/{train,test}.jsonl   one conversation per line, see tasks/base.py
    output/core/                       the CORE metric's data, if wanted, see core_bundle.py
    output/task_data.json              {"format", "datasets": {name: {...}}, "core": {...} or null}

The entry of a dataset has its `kind`, the numbers of `train` and `test` examples, and `overlap`:
the number of test examples whose prompt is also a training example's. Numbers may be below those of
the config if a dataset has no more. Published datasets also have their commit, a user's files their
sha256.

A dataset that is finished when the stage is stopped is reused when it resumes.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from nanochat_core.config import DatasetConfig, TaskDataConfig
from nanochat_core.data.conversations.custom_jsonl import read_own_file
from nanochat_core.data.conversations.disk_shuffle import Split, Spool, common_prompts
from nanochat_core.data.conversations.task_download import convert_split, download_dataset
from nanochat_core.data.hub.core_bundle import fetch_bundle
from nanochat_core.errors import DataError
from nanochat_core.job import Job, write_json
from nanochat_core.runtime.progress import Progress
from nanochat_core.runtime.seeding import seed_for
from tasks.base import SPLITS, TaskError, prompt_key
from tasks.kinds.sources import HubTask
from tasks.registry import generate, is_gradable, task_named

FORMAT = 2


def run(job: Job) -> dict[str, Any]:
    """Write every dataset of the config. Raises DataError if one cannot be made."""
    config = TaskDataConfig.from_tree(job.config["task_data"])
    progress = Progress(job.events)
    progress.start(len(config.datasets) + (config.core_bundle is not None), unit="dataset")
    scratch = job.directory / "scratch"
    scratch.mkdir(exist_ok=True)
    datasets: dict[str, dict[str, Any]] = {}
    for dataset in config.datasets:
        made = _find_made(dataset, scratch, job)
        datasets[dataset.name] = made or _make(dataset, scratch, job, progress)
        progress.step(len(datasets), examples=sum(datasets[dataset.name][s] for s in SPLITS))
    tree: dict[str, Any] = {"format": FORMAT, "datasets": datasets, "core": None}
    if config.core_bundle is not None:
        tree["core"] = fetch_bundle(
            config.core_bundle,
            job.output / "core",
            sha256=config.core_bundle_sha256,
            scratch=scratch,
            progress=progress,
        )
        progress.step(len(datasets) + 1, files=tree["core"]["files"])
    write_json(job.output / "task_data.json", tree)
    shutil.rmtree(scratch)
    return _metrics(datasets)


def _metrics(datasets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    counts = {f"{name}_{split}": item[split] for name, item in datasets.items() for split in SPLITS}
    overlaps = {f"{name}_overlap": item["overlap"] for name, item in datasets.items()}
    commits = {f"{name}_commit": i["commit"] for name, i in datasets.items() if "commit" in i}
    some = {name: overlap for name, overlap in overlaps.items() if overlap}
    return {**counts, "examples": sum(counts.values()), **some, **commits}


def _find_made(dataset: DatasetConfig, scratch: Path, job: Job) -> dict[str, Any] | None:
    """Return the entry of a dataset that was finished before the stage was stopped, or None."""
    try:
        tree = json.loads((scratch / f"{dataset.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if tree["config"] != dataset.canonical() or tree["seed"] != job.config["seed"]:
        return None
    return tree["entry"]


def _make(dataset: DatasetConfig, scratch: Path, job: Job, progress: Progress) -> dict[str, Any]:
    # An interrupted attempt may have left an incomplete spool.
    own = scratch / dataset.name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    entry = write_dataset(
        dataset,
        job.output / dataset.name,
        scratch=own,
        seed=job.config["seed"],
        progress=progress,
    )
    shutil.rmtree(own)
    # After the dataset's files: this record means that they are complete.
    tree = {"config": dataset.canonical(), "seed": job.config["seed"], "entry": entry}
    write_json(scratch / f"{dataset.name}.json", tree)
    return entry


def write_dataset(
    dataset: DatasetConfig, directory: Path, *, scratch: Path, seed: int, progress: Progress
) -> dict[str, Any]:
    """Write both splits into `directory`, each atomically; return the dataset's entry.

    Raises DataError if the dataset cannot be downloaded or read, if a generated one has too few
    examples, or if a graded generated one has a test prompt that is also a training prompt.
    """
    with Spool(scratch / "lines-1") as one, Spool(scratch / "lines-2") as two:
        try:
            if dataset.path is not None:
                train, test = read_own_file(dataset, one, progress.message)
                entry = {"kind": "own", "sha256": dataset.snapshot}
            elif isinstance(task := task_named(dataset.name), HubTask):
                train, test, entry = _published(task, dataset, (one, two), progress)
            else:
                train, test = _generated(dataset, (one, two), seed)
                entry = {"kind": "generated", "grade": dataset.grade}
        except TaskError as error:
            raise DataError(
                str(error), hint=f"see the entry '{dataset.name}' of task_data.datasets"
            ) from error
        train, test = train.first(dataset.num_train), test.first(dataset.num_test)
        overlap = common_prompts(train, test)
        # A published dataset may overlap, which is reported; ours would be a bug in its generator.
        if len(overlap) and entry["kind"] == "generated" and is_gradable(dataset.name):
            raise DataError(
                f"{len(overlap)} prompts of task '{dataset.name}' are in both train and test, "
                f"for example {prompt_key(test.spool.read(int(overlap[0])))!r}",
                hint="its generator must decide by the prompt to which split an example belongs, "
                "as in docs/contributing/task.md",
            )
        train.write(directory / "train.jsonl", scratch=scratch)
        test.write(directory / "test.jsonl", scratch=scratch)
    text = f"{dataset.name}: {len(train):,} examples to train on, {len(test):,} to test with"
    if len(overlap):
        text += f", {len(overlap):,} of which ask what a training example asks"
    progress.message(text)
    return {**entry, "train": len(train), "test": len(test), "overlap": len(overlap)}


def _generated(
    dataset: DatasetConfig, spools: tuple[Spool, Spool], seed: int
) -> tuple[Split, Split]:
    """Generate both splits of a synthetic task. Raises TaskError, as tasks do."""
    counts = (dataset.num_train, dataset.num_test)
    for split, count, spool in zip(SPLITS, counts, spools, strict=True):
        if count is None:
            raise TaskError(f"{dataset.name} is synthetic: give num_train and num_test")
        purpose = seed_for(seed, "task_data", dataset.name, split)
        for example in generate(dataset.name, split, count, grade=dataset.grade, seed=purpose):
            spool.add(example)
    return spools[0].everything(), spools[1].everything()


def _published(
    task: HubTask, dataset: DatasetConfig, spools: tuple[Spool, Spool], progress: Progress
) -> tuple[Split, Split, dict[str, Any]]:
    counts = (dataset.num_train, dataset.num_test)
    wanted = [split for split, count in zip(SPLITS, counts, strict=True) if count != 0]
    # A split of which no examples are wanted is not downloaded.
    revision = dataset.revision or task.dataset.revision
    commit, files = download_dataset(task, revision, wanted, progress=progress)
    (train, train_rows), (test, test_rows) = (
        convert_split(task, files.get(split, ()), spool, num_examples=count, commit=commit)
        for split, count, spool in zip(SPLITS, counts, spools, strict=True)
    )
    entry = {
        "kind": "published",
        "repository": task.dataset.repository,
        "revision": revision,
        "commit": commit,
        "rows": {"train": train_rows, "test": test_rows},
    }
    return train, test, entry
