"""Stage `shards`: the pretraining text as parquet files of shuffled documents.

Training shards first, then one for validation. Documents are distributed to the shards round robin
through scratch files and shuffled inside each, so that memory holds one shard only. Datasets on the
Hub are such shards already.
"""

import contextlib
import json
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanochat_core.config import ShardsConfig
from nanochat_core.data.hub.datasets import DATASETS
from nanochat_core.data.hub.shards import fetch_shards
from nanochat_core.data.shard_files import ShardFile, ShardSet, shard_name, write_shard
from nanochat_core.data.text import hub_text, local_text, pydocs, s3_text
from nanochat_core.data.text.counted_text import CountedText
from nanochat_core.data.text.documents import Document, TextSource
from nanochat_core.data.text.installed import current_snapshot, installed_source
from nanochat_core.data.text.text_files import DIVIDE
from nanochat_core.errors import ConfigError, DataError
from nanochat_core.job import Job
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.progress import Progress
from nanochat_core.runtime.seeding import seed_for

MAX_VALIDATION_SHARE = 0.04  # of the groups of documents; less if there are many shards

# Others are those of installed packages.
TEXT_SOURCES = {
    "pydocs": TextSource(documents=pydocs.documents),
    "local": TextSource(documents=local_text.documents),
    "hub": TextSource(documents=hub_text.documents),
    "s3": TextSource(documents=s3_text.documents),
}


def run(job: Job) -> dict[str, Any]:
    """Write the shards and `shards.json`."""
    config = ShardsConfig.from_tree(job.config["shards"])
    if config.num_shards < 1:
        raise ConfigError(f"shards.num_shards is {config.num_shards}", hint="at least 1")
    if config.separator == "":
        raise ConfigError("shards.separator is empty", hint="null divides no file")
    progress = Progress(job.events)
    scratch = job.directory / "scratch"
    scratch.mkdir(exist_ok=True)
    origin = None
    if config.source in DATASETS:
        shards, blanks, origin = fetch_shards(
            config, job.output, scratch=scratch, progress=progress
        )
    else:
        counted = CountedText(_open_source(config).documents(config, progress, scratch))
        shards, blanks = _write_shards(
            counted, config, job.output, seed=job.config["seed"], scratch=scratch
        )
        for warning in counted.warnings():
            progress.message(f"warning: {warning}")
    # The index comes last: a directory without it holds no shards.
    ShardSet(directory=job.output, shards=shards, origin=origin).write()
    shutil.rmtree(scratch)
    return {
        "documents": sum(shard.documents for shard in shards),
        "characters": sum(shard.characters for shard in shards),
        "validation_documents": shards[-1].documents,
        "validation_characters": shards[-1].characters,
        "blank_documents": blanks,  # left out
        **({"commit": origin.commit} if origin else {}),
    }


def _open_source(config: ShardsConfig) -> TextSource:
    """Return the text source. Raises ConfigError, and DataError if an installed one's text changed.

    The built-in ones compare with the snapshot themselves.
    """
    if config.source in TEXT_SOURCES:
        return TEXT_SOURCES[config.source]
    source = installed_source(config.source)
    if current_snapshot(source, config) != config.snapshot:
        raise DataError(
            f"the text of '{config.source}' has changed since the run was planned",
            hint="plan the run again",
        )
    return source


def _write_shards(
    documents: Iterable[Document], config: ShardsConfig, output: Path, *, seed: int, scratch: Path
) -> tuple[tuple[ShardFile, ...], int]:
    """Distribute, shuffle and write the documents; return the shards and the number of blank ones.

    Blank documents are left out. Raises DataError if a shard would be empty.
    """
    piles = [scratch / f"{shard_name(n)}.jsonl" for n in range(config.num_shards + 1)]
    counts, blanks = _deal(documents, piles, seed=seed)
    if not all(counts):
        many = f"{sum(counts):,} document{'s' if sum(counts) != 1 else ''}"
        raise DataError(
            f"{many}: too few for {config.num_shards} training shards and one for validation",
            hint="a .txt is one document, however long: divide it at blank lines by "
            f"{DIVIDE}; or give more documents (a hundred is little) or a smaller "
            "shards.num_shards",
        )
    shards: list[ShardFile] = []
    for number, pile in enumerate(piles):
        with pile.open(encoding="ascii") as file:
            texts = [json.loads(line) for line in file]
        random.Random(seed_for(seed, "shuffle", number)).shuffle(texts)
        shards.append(write_shard(output / shard_name(number), texts, scratch=scratch))
    return tuple(shards), blanks


def _deal(documents: Iterable[Document], piles: list[Path], *, seed: int) -> tuple[list[int], int]:
    """Append each document to a pile, those for validation to the last.

    Returns the documents per pile and the number of blank ones.
    """
    # Only a group's name decides whether it is for validation: documents of a group resemble each
    # other, so one in training and one in validation would lower the validation loss.
    num_train = len(piles) - 1
    threshold = int(min(MAX_VALIDATION_SHARE, 1 / len(piles)) * 2**63)
    counts, blanks = [0] * len(piles), 0
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(pile.open("w", encoding="ascii")) for pile in piles]
        for document in documents:
            HEARTBEAT.beat("dealing out documents")
            if not document.text.strip():
                blanks += 1
                continue
            is_validation = seed_for(seed, "validation", document.group) < threshold
            # Round robin over the training documents alone.
            pile = num_train if is_validation else sum(counts[:-1]) % num_train
            files[pile].write(json.dumps(document.text) + "\n")
            counts[pile] += 1
    return counts, blanks
