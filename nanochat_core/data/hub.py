"""Text from a dataset on the Hugging Face Hub that is already cut into shuffled shards."""

from dataclasses import dataclass
from pathlib import Path

from nanochat_core.config import ShardsConfig
from nanochat_core.data.shard_files import ShardFile, inspect_shard, move_into_place, shard_name
from nanochat_core.errors import ConfigError, DataError
from nanochat_core.runtime.progress import Progress


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """A dataset of parquet files shard_00000, shard_00001 ... with a column `text`."""

    repository: str
    num_shards: int  # the last one is for validation


DATASETS = {
    "climbmix": HubDataset(repository="karpathy/climbmix-400b-shuffle", num_shards=6543),
    "fineweb-edu": HubDataset(repository="karpathy/fineweb-edu-100b-shuffle", num_shards=1823),
}


def fetch_shards(
    config: ShardsConfig, output: Path, *, scratch: Path, progress: Progress
) -> list[ShardFile]:
    """Download the first `config.num_shards` shards and the dataset's last one into `output`.

    Shards that are there already stay. Raises ConfigError for more shards than the dataset has,
    DataError when one cannot be downloaded or read.
    """
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
    remote = [*range(config.num_shards), dataset.num_shards - 1]
    progress.start(len(remote), unit="shard")
    shards: list[ShardFile] = []
    for number, remote_number in enumerate(remote):
        path = output / shard_name(number)
        if not path.exists():
            name = shard_name(remote_number)
            downloaded = _download(dataset, name, revision=config.revision, scratch=scratch)
            inspect_shard(downloaded)
            move_into_place(downloaded, path)
        shards.append(inspect_shard(path))
        progress.step(number + 1)
    return shards


def _download(dataset: HubDataset, name: str, *, revision: str, scratch: Path) -> Path:
    """Download one file; a partial one of an earlier attempt in `scratch` is continued."""
    from huggingface_hub import hf_hub_download  # slow to import, and not needed offline

    try:
        path = hf_hub_download(
            dataset.repository, name, repo_type="dataset", revision=revision, local_dir=scratch
        )
    except OSError as error:  # every error of the Hub's client is one
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{name} of {dataset.repository} cannot be downloaded: {reason}",
            hint="check the network, HF_ENDPOINT and HF_HUB_OFFLINE, then run again: what is "
            "downloaded stays; or train on text at hand with --set shards.source=local",
        ) from error
    return Path(path)
