"""Files of examples, as stage `task_data` writes them."""

from collections.abc import Iterable
from pathlib import Path

from tasks.base import Conversation
from tasks.kinds.files import line_of


def write_examples(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(map(line_of, conversations)), encoding="ascii")
