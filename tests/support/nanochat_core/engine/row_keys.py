"""The keys of random streams, written once more in numpy's uint64: SplitMix64."""

import numpy as np
import torch
from torch import Tensor


def row_keys(seeds: Tensor, samples: Tensor) -> Tensor:
    """`row_key` of each row, all int64."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    keys = _mixed(seeds.numpy().astype(np.uint64) + golden)
    keys = _mixed(keys + samples.numpy().astype(np.uint64) * golden)
    return torch.from_numpy(keys.astype(np.int64))


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
