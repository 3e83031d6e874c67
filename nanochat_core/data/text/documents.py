"""The documents that text sources yield to the `shards` stage."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanochat_core.config import ShardsConfig
from nanochat_core.runtime.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and its group, which decides whether it is training or validation text."""

    text: str
    group: str  # all documents of a group are in the same split


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """A source of text.

    `documents` yields them, always in the same order; what it leaves in the folder is found by the
    next attempt of a stage that was stopped. `snapshot` returns words that differ when the text
    does: they are part of the fingerprint. Without it, the text depends on the settings alone.
    """

    documents: Callable[[ShardsConfig, Progress, Path], Iterator[Document]]
    snapshot: Callable[[ShardsConfig], Sequence[str]] | None = None
