"""A document on its way from a text source to the shards."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text, and the group that decides whether it is training or validation text."""

    text: str
    group: str  # documents of one group stay on one side
