"""Datasets on the Hugging Face Hub that are already cut into shuffled shards."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HubDataset:
    """A dataset of parquet files shard_00000, shard_00001 ... with a column `text`."""

    repository: str
    num_shards: int  # the last one is for validation


# As published: every shard has about 250 million characters.
DATASETS = {
    "climbmix": HubDataset(repository="karpathy/climbmix-400b-shuffle", num_shards=6543),
    "fineweb-edu": HubDataset(repository="karpathy/fineweb-edu-100b-shuffle", num_shards=1823),
}
