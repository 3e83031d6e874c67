"""The documents that text sources yield to the `shards` stage."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and its group, which decides whether it is training or validation text."""

    text: str
    group: str  # all documents of a group are in the same split
