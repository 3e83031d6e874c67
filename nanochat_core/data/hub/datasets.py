"""Datasets of text on the Hugging Face Hub."""

from dataclasses import dataclass

from nanochat_core.config import ShardsConfig
from nanochat_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """A dataset already cut into shuffled shards.

    Its files are shard_00000.parquet, shard_00001.parquet ... with a column `text`.
    """

    repository: str
    num_shards: int  # the last one is for validation


# As published: every shard has about 250 million characters.
DATASETS = {
    "climbmix": HubDataset(repository="karpathy/climbmix-400b-shuffle", num_shards=6543),
    "fineweb-edu": HubDataset(repository="karpathy/fineweb-edu-100b-shuffle", num_shards=1823),
}


def split_path(path: str | None) -> tuple[str, str]:
    """Split the `shards.path` of source "hub": owner/name, and a folder or pattern of its files.

    Raises ConfigError if it names no dataset.
    """
    # The Hub's own addresses begin with the kind of repository.
    owner, _, rest = (path or "").removeprefix("datasets/").partition("/")
    name, _, pattern = rest.partition("/")
    if "@" in name:
        raise ConfigError(
            f"shards.path is '{path}', with a revision",
            hint=f"leave it out, and --set shards.revision={name.partition('@')[2]}",
        )
    if not owner or not name or "*" in owner + name:
        raise ConfigError(
            f"shards.path is '{path or ''}', which names no dataset on the Hub",
            hint="give owner/name, or owner/name/data/train-* for some of its files",
        )
    return f"{owner}/{name}", pattern.rstrip("/")


def repository_of(config: ShardsConfig) -> str | None:
    """Return the dataset on the Hub that text is downloaded from; None for another source."""
    if config.source == "hub":
        return split_path(config.path)[0]
    dataset = DATASETS.get(config.source)
    return None if dataset is None else dataset.repository
