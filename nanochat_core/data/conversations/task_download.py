"""Download datasets from the Hub and convert their rows to conversations, in nanochat's order.

The order is numpy's permutation of all rows by seed 42, so that the first N are nanochat's first N.
"""

import contextlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_core.data.conversations.disk_shuffle import Split, Spool
from nanochat_core.data.hub.client import download, list_files
from nanochat_core.errors import DataError, first_line
from nanochat_core.runtime.progress import Progress
from tasks.base import TaskError
from tasks.kinds.sources import HubTask

ORDER_SEED = 42
_BATCH_ROWS = 1024  # in memory at a time


def download_dataset(
    task: HubTask, revision: str, splits: Sequence[str], *, progress: Progress
) -> tuple[str, dict[str, list[tuple[str, Path]]]]:
    """Download the files of these splits, of which the dataset may lack some.

    Returns the commit, and split -> (path on the Hub, path here) of its files. Raises DataError if
    they cannot be downloaded.
    """
    dataset = task.dataset
    patterns = {split: dataset.files[split] for split in splits if split in dataset.files}
    commit, files = list_files(dataset.repository, revision, [*patterns.values()])
    size = sum(file.size for file in files)
    progress.message(
        f"{task.name}: {dataset.repository} at commit {commit[:12]}, "
        f"{len(files)} files, {size / 1e6:,.1f} MB"
    )
    places = download(dataset.repository, commit, files, log=progress.message)
    found = list(zip((file.path for file in files), places, strict=True))
    return commit, {
        split: [(name, place) for name, place in found if fnmatchcase(name, pattern)]
        for split, pattern in patterns.items()
    }


def convert_split(
    task: HubTask,
    files: Sequence[tuple[str, Path]],
    spool: Spool,
    *,
    num_examples: int | None,
    commit: str,
) -> tuple[Split, int]:
    """Convert the first `num_examples` (None means all) in nanochat's order.

    Returns them and the number of all rows. Files are read in the given order, a batch of rows at a
    time. Raises DataError naming repository, file and row for one that is no conversation, and the
    file if it cannot be read.
    """
    sizes = [_num_rows(task, name, path) for name, path in files]
    order = np.random.default_rng(ORDER_SEED).permutation(sum(sizes))[:num_examples]
    is_wanted = np.zeros(sum(sizes), dtype=np.bool_)
    is_wanted[order] = True
    # In file order, not in the final one: parquet can only be read in large batches.
    first = 0
    for (name, path), size in zip(files, sizes, strict=True):
        for row, tree in _read(task, name, path, is_wanted[first : first + size]):
            try:
                spool.add(task.convert(tree))
            except TaskError as error:
                raise DataError(
                    f"{task.dataset.repository}: {name} row {row}: {error}",
                    hint=f"commit {commit[:12]} is not what tasks/ was written for: give a "
                    f"revision of {task.name} in task_data.datasets",
                ) from error
        first += size
    # The spool has the wanted rows in file order: a row's number is the count of those before it.
    return spool.split((np.cumsum(is_wanted) - 1)[order]), sum(sizes)


def _num_rows(task: HubTask, name: str, path: Path) -> int:
    with _named(task, name):
        return pq.read_metadata(path).num_rows


def _read(
    task: HubTask, name: str, path: Path, is_wanted: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the wanted rows of a file with their row numbers."""
    first = 0
    # pre_buffer, which is on by default, would hold the whole file in memory.
    with _named(task, name), pq.ParquetFile(path, pre_buffer=False) as file:
        for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
            rows = np.flatnonzero(is_wanted[first : first + batch.num_rows])
            if len(rows):
                trees = batch.take(pa.array(rows)).to_pylist()
                yield from zip((first + rows).tolist(), trees, strict=True)
            first += batch.num_rows


@contextlib.contextmanager
def _named(task: HubTask, name: str) -> Iterator[None]:
    """Convert errors of reading parquet to DataError."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{task.dataset.repository}: {name} cannot be read as parquet: {first_line(error)}",
            hint=f"give another revision of {task.name} in task_data.datasets",
        ) from error
