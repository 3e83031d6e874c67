"""Download text from a dataset on the Hugging Face Hub that consists of shuffled shards."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanochat_core.config import ShardsConfig
from nanochat_core.data.hub.client import download, list_files
from nanochat_core.data.hub.datasets import DATASETS, HubDataset
from nanochat_core.data.shard_files import (
    Origin,
    ShardFile,
    inspect_shard,
    shard_name,
    write_without_blanks,
)
from nanochat_core.errors import ConfigError, DataError
from nanochat_core.job import move_into_place
from nanochat_core.runtime.progress import Progress

THREADS = 8


def fetch_shards(
    config: ShardsConfig, output: Path, *, scratch: Path, progress: Progress
) -> tuple[tuple[ShardFile, ...], int, Origin]:
    """Download the first `config.num_shards` shards and the dataset's last one into `output`.

    Returns the shards (validation last), the number of blank documents left out, and the origin.
    Files in the Hub client's cache are reused. A shard has the Hub's exact bytes, unless some of
    its documents are blank: then it is rewritten without them.
    Raises ConfigError for more shards than the dataset has, DataError if one cannot be downloaded
    or read, or if the repository lacks one of them.
    """
    dataset, revision = _open_dataset(config)
    commit, files = list_files(dataset.repository, revision, ["shard_*.parquet"])
    by_path = {file.path: file for file in files}
    # The dataset's last shard is validation, whatever the number of training shards.
    numbers = [*range(config.num_shards), dataset.num_shards - 1]
    names = [shard_name(number) for number in numbers]
    if missing := [name for name in names if name not in by_path]:
        raise DataError(
            f"{dataset.repository} has no file {missing[0]} at commit {commit[:12]}: it has "
            f"{len(files)} shards, {dataset.num_shards} are expected",
            hint="choose another commit with --set shards.revision=COMMIT",
        )
    wanted = [by_path[name] for name in names]
    size = sum(file.size for file in wanted)
    progress.message(
        f"{dataset.repository} at commit {commit[:12]}: {len(wanted)} shards, {size / 1e6:,.0f} MB"
    )

    downloaded = download(dataset.repository, commit, wanted, log=progress.message)
    progress.start(len(wanted), unit="shard")
    shards: list[ShardFile] = []
    all_blanks = 0
    # Threads: pyarrow decompresses without Python's lock, for a second a shard.
    pool = ThreadPoolExecutor(THREADS)
    try:
        paths = [output / shard_name(number) for number in range(len(wanted))]
        inspected = pool.map(lambda at, path: inspect_shard(at, name=path.name), downloaded, paths)
        for source, path, (shard, blanks) in zip(downloaded, paths, inspected, strict=True):
            if blanks:
                write_without_blanks(source, path, scratch=scratch)
            else:
                # The cache's path is a symlink to the content.
                _place(source.resolve(), path, scratch=scratch)
            shards.append(shard)
            all_blanks += blanks
            progress.step(len(shards), bytes=sum(file.size for file in wanted[: len(shards)]))
    finally:
        pool.shutdown(cancel_futures=True)
    origin = Origin(repository=dataset.repository, revision=revision, commit=commit)
    return tuple(shards), all_blanks, origin


def _open_dataset(config: ShardsConfig) -> tuple[HubDataset, str]:
    """Return the configured dataset and its revision. Raises ConfigError."""
    dataset = DATASETS[config.source]
    if config.num_shards >= dataset.num_shards:
        raise ConfigError(
            f"shards.num_shards is {config.num_shards}, "
            f"{dataset.repository} has {dataset.num_shards - 1} for training"
        )
    if config.revision is None:
        raise ConfigError(
            f"shards.revision is missing for {dataset.repository}",
            hint="--set shards.revision=main, or a commit to always get the same text",
        )
    return dataset, config.revision


def _place(source: Path, path: Path, *, scratch: Path) -> None:
    """Hard-link `source`, which no process writes to, to `path`; copy it if that is impossible."""
    temporary = scratch / path.name
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, temporary)
    move_into_place(temporary, path)
