"""Files of rows, as stage `rows` writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from nanochat_core.data.row_files import write_index
from nanochat_core.tokenizer.bpe import Tokenizer


def write_rows(directory: Path, tokenizer: Tokenizer, rows: Mapping[str, npt.NDArray[Any]]) -> Path:
    """Write the rows (N, T+1) of each split into a directory of its own; return it."""
    directory.mkdir()
    for split, ids in rows.items():
        ids.astype("<u2").tofile(directory / f"{split}.rows")
    index = {
        "sequence_len": rows["train"].shape[1] - 1,
        "dtype": "uint16",
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.digest(),
        "policy": "default",
        **{f"num_{split}": len(ids) for split, ids in rows.items()},
        "tokens": rows["train"].size,
        "waste": 0.0,
    }
    write_index(directory, index)
    return directory
