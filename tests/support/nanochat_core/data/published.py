"""Made-up rows as the files of published datasets, on the mimic of the Hub."""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.kinds.sources import HubTask
from tasks.registry import task_named
from tests.support.nanochat_core.data.hub_server import HubServer
from tests.support.tasks.peer import parquet_of

Rows = Sequence[Mapping[str, Any]]


def publish(hub: HubServer, name: str, *, train: Rows = (), test: Rows = ()) -> str:
    """Commit rows as the files of a task's dataset, those of training in two; the commit."""
    task = task_named(name)
    assert isinstance(task, HubTask)
    dataset = task.dataset
    half = len(train) // 3
    files = {"README.md": b"# Data", "other/train-00000-of-00001.parquet": b"not this one"}
    for split, parts in (("train", (train[:half], train[half:])), ("test", (test,))):
        for i, rows in enumerate(parts):
            if rows:
                place = dataset.files[split].replace("*", f"0000{i}-of-0000{len(parts)}")
                files[place] = parquet_of(rows, row_group_size=50)
    return hub.add(dataset.repository, files)
