"""Read a user's own conversations: a JSONL file, each line one of

    [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]
    {"messages": [...], "split": "test"}              `split` may be left out

Without a split, a hash of the conversation's prompt decides, so that equal prompts are in the same
split, and adding lines moves none of the others. If no line of a file has a split, at least one
prompt is for testing.
"""

import hashlib
import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from nanochat_core.config import DatasetConfig
from nanochat_core.data.conversations.disk_shuffle import Split, Spool
from nanochat_core.errors import DataError, reason_of
from tasks.base import SPLITS, Conversation, TaskError, check_conversation

TEST_PERCENT = 5  # of the distinct prompts

_HINT = (
    'a line is [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], '
    'or {"messages": [...]}'
)
_UNSAID, _TRAIN, _TEST = range(3)


def read_own_file(dataset: DatasetConfig, spool: Spool) -> tuple[Split, Split]:
    """Read training and test examples, in the order of the file, a line at a time.

    Raises DataError naming `path:line` for one that is no conversation, and if the file is not the
    one that the run was planned with.
    """
    assert dataset.path is not None
    path = Path(dataset.path)
    said = array("b")
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # Of the bytes that are parsed: the file may change between two reads.
                digest.update(line)
                if line.strip():
                    conversation, split = _parse(line, where=f"{path}:{number}")
                    spool.add(conversation)
                    said.append(split)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {reason_of(error)}",
            hint=f"it is the path of '{dataset.name}' in task_data.datasets",
        ) from error
    if digest.hexdigest() != dataset.snapshot:
        raise DataError(
            f"{path} has sha256 {digest.hexdigest()[:12]}, "
            f"the run was planned with {str(dataset.snapshot)[:12]}",
            hint="it has changed since: run again",
        )
    if not said:
        raise DataError(f"{path} has no conversation", hint=_HINT)
    is_test = _choose_test(np.array(said), spool)
    return spool.split(np.flatnonzero(~is_test)), spool.split(np.flatnonzero(is_test))


def _choose_test(said: np.ndarray[Any, Any], spool: Spool) -> np.ndarray[Any, Any]:
    """Return which conversations are for testing (n,) bool."""
    prompts = spool.prompts(np.arange(len(said)))
    chosen = (prompts % np.uint64(100)) < TEST_PERCENT
    if not said.any() and not chosen.any() and (prompts != prompts[0]).any():
        chosen = prompts == prompts.min()  # any one would do; the smallest hash is reproducible
    return np.where(said == _UNSAID, chosen, said == _TEST)


def _parse(line: bytes, *, where: str) -> tuple[Conversation, int]:
    """Parse a conversation and its split, _UNSAID if the line has none. Raises DataError."""
    try:
        tree: Any = json.loads(line.decode("utf-8"), parse_constant=_refuse)
        split = tree.get("split") if isinstance(tree, dict) else None
        messages = tree.get("messages") if isinstance(tree, dict) else tree
        conversation: Conversation = {"messages": messages}
        check_conversation(conversation)
        if all(message["role"] != "assistant" for message in conversation["messages"]):
            raise TaskError("the conversation has no answer")
        if split not in (None, *SPLITS):
            raise TaskError(f"split is {split!r}, expected one of: {', '.join(SPLITS)}")
    except TaskError as error:
        raise DataError(f"{where}: {error}", hint=_HINT) from error
    except (ValueError, RecursionError) as error:  # nested too deep
        raise DataError(f"{where}: not JSON: {error}", hint=_HINT) from error
    return conversation, {None: _UNSAID, "train": _TRAIN, "test": _TEST}[split]


def _refuse(constant: str) -> None:
    # Python's parser accepts NaN and Infinity, which are not JSON.
    raise ValueError(f"{constant} is no number in JSON")
