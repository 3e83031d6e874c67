"""Check a run's text and datasets when it is planned, and take snapshots of local files.

A snapshot is a digest of the contents, part of the configuration and so of the fingerprint. With a
given snapshot, a machine that lacks the file can plan, and run the stages after it.
"""

import dataclasses
from pathlib import Path

from infra.storage.files import sha256_of
from nanochat_core.config import DatasetConfig, ShardsConfig, TaskDataConfig
from nanochat_core.data.hub.datasets import DATASETS, split_path
from nanochat_core.data.text.installed import current_snapshot, installed_source
from nanochat_core.data.text.pydocs import python_snapshot
from nanochat_core.data.text.text_folder import folder_snapshot
from nanochat_core.errors import ConfigError, reason_of
from tasks.base import TaskError
from tasks.kinds.sources import HubTask
from tasks.names import all_names, references_of
from tasks.registry import task_named


def with_snapshots(config: TaskDataConfig) -> TaskDataConfig:
    """Return `config` with a snapshot of each dataset that is a local file.

    Raises ConfigError for a dataset that is neither a task nor a file that can be read.
    """
    return dataclasses.replace(config, datasets=tuple(map(_look_at, config.datasets)))


def text_snapshot(shards: ShardsConfig) -> tuple[str, ...]:
    """Return the snapshot of a text source on this machine; empty for one with revisions.

    Raises ConfigError for a path that the source cannot have, DataError for text that cannot be
    read.
    """
    for name in ("column", "separator"):
        if (value := getattr(shards, name)) and shards.source not in ("local", "hub", "s3"):
            raise ConfigError(
                f"shards.{name} is {value!r}, but the text source is '{shards.source}'",
                hint="only the sources local, hub and s3 read files of any layout",
            )
    match shards.source:
        case "local":
            return _folder_snapshot(shards.path)
        case "pydocs":
            return shards.snapshot or python_snapshot()
        case "hub":
            split_path(shards.path)
            return ()
        case "s3":
            # Imported here: it loads pyarrow, which no other plan needs.
            from nanochat_core.data.text.s3_text import s3_snapshot

            return s3_snapshot(shards.path)
        case name if name in DATASETS:
            return ()
        case name:
            return current_snapshot(installed_source(name), shards)


def published_task(dataset: DatasetConfig) -> HubTask | None:
    """Return the task whose dataset on the Hub this is; None if it is a file, synthetic or unknown.

    Raises ConfigError if the task is of an installed package and cannot be used.
    """
    if dataset.path is not None or not references_of(dataset.name):
        return None
    try:
        task = task_named(dataset.name)
    except TaskError as error:
        raise ConfigError(str(error), hint="fix or uninstall the package that has it") from error
    return task if isinstance(task, HubTask) else None


def _look_at(dataset: DatasetConfig) -> DatasetConfig:
    if dataset.revision is not None and published_task(dataset) is None:
        raise ConfigError(
            f"the dataset '{dataset.name}' has revision {dataset.revision}, "
            "but none that is published has that name",
            hint="only datasets on the Hub have revisions",
        )
    if dataset.path is None:
        _check_task(dataset)
        return dataset
    if references_of(dataset.name):
        raise ConfigError(
            f"the dataset {dataset.path} is called '{dataset.name}', as a task is",
            hint="give it a name of its own in task_data.datasets",
        )
    path = Path(dataset.path).expanduser().resolve()
    # The job that reads the file compares its digest again, so the given snapshot is safe.
    if dataset.snapshot is not None and not path.exists():
        return dataset
    try:
        snapshot = sha256_of(path)
    except OSError as error:
        raise ConfigError(
            f"the dataset '{dataset.name}' cannot be read: {path}: {reason_of(error)}",
            hint="its path is that of a file with a conversation a line",
        ) from error
    if dataset.snapshot not in (None, snapshot):
        raise ConfigError(
            f"the dataset '{dataset.name}' should have sha256 {str(dataset.snapshot)[:12]}, "
            f"{path} has {snapshot[:12]}",
            hint="leave its snapshot out to take the file as it is",
        )
    return dataclasses.replace(dataset, path=str(path), snapshot=snapshot)


def _check_task(dataset: DatasetConfig) -> None:
    if not references_of(dataset.name):
        raise ConfigError(
            f"there is no task '{dataset.name}'",
            hint=f"give the dataset a path, or one of: {', '.join(all_names())}",
        )
    if dataset.snapshot is not None:
        raise ConfigError(f"the dataset '{dataset.name}' has a snapshot, but no path")
    counts = (dataset.num_train, dataset.num_test)
    if published_task(dataset) is None and None in counts:
        raise ConfigError(
            f"{dataset.name} is synthetic: it has as many examples as are asked for",
            hint=f"give num_train and num_test of {dataset.name} in task_data.datasets",
        )


def _folder_snapshot(path: str | None) -> tuple[str, ...]:
    """Return the state of a folder of text. Raises ConfigError if it does not exist, DataError."""
    if path is None:
        raise ConfigError(
            "the text source 'local' needs a folder", hint="add --set shards.path=FOLDER"
        )
    if not Path(path).is_dir():
        raise ConfigError(
            f"shards.path {path} is not a folder",
            hint="give a folder of .parquet, .jsonl or .txt files",
        )
    return folder_snapshot(Path(path))
