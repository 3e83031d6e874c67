"""Stage `tokenizer`: learn a vocabulary from the training shards.

How well the vocabulary fits is reported as an event, not as a file of the artifact: later stages
are rebuilt when a file changes, and a better measurement is no reason to train a model again.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nanochat_core.config import TokenizerConfig
from nanochat_core.data.shard_files import ShardSet, read_batches
from nanochat_core.job import Job
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.progress import Progress
from nanochat_core.tokenizer.bpe import Tokenizer
from nanochat_core.tokenizer.evaluation import HELD_OUT, evaluate
from nanochat_core.tokenizer.patterns import PATTERNS

MEASURED_CHARS = 2_000_000  # of validation text, to say how well the vocabulary fits
_LEARNING_TIMES = 4.0  # minutes for billions of characters on a fast machine


def run(job: Job) -> dict[str, Any]:
    """Train the tokenizer, and write its two files."""
    config = TokenizerConfig.from_tree(job.config["tokenizer"])
    progress = Progress(job.events)
    shards = ShardSet.open(job.inputs["shards"])
    progress.message(
        f"learning {config.vocab_size} tokens from up to {config.max_chars:,} characters"
    )
    started = time.monotonic()
    texts = limited_texts(
        shards.train, max_chars=config.max_chars, document_cap=config.document_cap
    )
    # It counts words and merges pairs in one call into Rust, which cannot beat after the last text.
    with HEARTBEAT.busy("learning the vocabulary", times=_LEARNING_TIMES):
        tokenizer = Tokenizer.train(
            texts, vocab_size=config.vocab_size, pattern=PATTERNS[config.pattern]
        )
    progress.message(f"learnt them in {time.monotonic() - started:.1f} seconds")
    tokenizer.save(job.output)
    held_out = limited_texts(
        [shards.validation], max_chars=MEASURED_CHARS, document_cap=MEASURED_CHARS
    )
    fit = evaluate(tokenizer, list(held_out))
    progress.eval(0, **fit)
    return {"vocab_size": tokenizer.vocab_size, "bytes_per_token": fit[HELD_OUT]}


def limited_texts(shards: Sequence[Path], *, max_chars: int, document_cap: int) -> Iterator[str]:
    """Yield the first `document_cap` characters of each document, `max_chars` in all."""
    given = 0
    for shard in shards:
        for texts in read_batches(shard):
            for text in texts:
                text = text[: min(document_cap, max_chars - given)]
                given += len(text)
                yield text
                if given >= max_chars:
                    return
