"""Read a user's own conversations: a JSONL file, each line one of

    [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]
    {"messages": [...], "split": "test"}              `split` may be left out

An assistant's message with "weight": 0 is not learnt; WEIGHT_KEYS are other trainers' names for it.
A key that would change what is learnt, and is not obeyed, is an error: of a message every other
one, of a line REFUSED_KEYS. Keys that are null or empty count as missing.

Without a split, a hash of the conversation's prompt decides, so that equal prompts are in the same
split, and adding lines moves none of the others. If no line of a file has a split, at least one
prompt is for testing.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanochat_core.config import DatasetConfig
from nanochat_core.data.conversations.disk_shuffle import Split, Spool
from nanochat_core.errors import DataError, reason_of
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.section import shown
from tasks.base import SPLITS, Conversation, TaskError, check_conversation
from tasks.user_files import FileFault, json_lines

TEST_PERCENT = 5  # of the distinct prompts
WEIGHT_KEYS = ("weight", "train", "training", "loss", "loss_mask")
REFUSED_KEYS = (
    *(*WEIGHT_KEYS, "weights", "mask", "masks", "train_on_inputs", "train_on_input"),
    *("tools", "functions", "system", "chosen", "rejected", "label"),
)

_HINT = (
    'a line is [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], '
    'or {"messages": [...]}'
)
_KEYS_HINT = "keys are role, content and, of an assistant, weight: 0 for a message not to be learnt"
_KEYS = {"messages", "split"}
_UNSAID, _TRAIN, _TEST = range(3)


def read_own_file(
    dataset: DatasetConfig, spool: Spool, log: Callable[[str], None] = lambda text: None
) -> tuple[Split, Split]:
    """Read training and test examples, in the order of the file, a line at a time.

    `log` gets a line on keys that are ignored. Raises DataError naming `path:line` for one that is
    no conversation, and if the file is not the one that the run was planned with.
    """
    assert dataset.path is not None
    path = Path(dataset.path)
    said = array("b")
    ignored: Counter[str] = Counter()
    # Of the bytes that are parsed: the file may change between two reads.
    digest = hashlib.sha256()
    try:
        for where, tree in json_lines(path, hint=_HINT, digest=digest):
            HEARTBEAT.beat("reading conversations")
            conversation, split = _parse(tree, where=where)
            spool.add(conversation)
            said.append(split)
            ignored.update(_present(tree).keys() - _KEYS if isinstance(tree, dict) else ())
    except FileFault as error:
        raise DataError(str(error), hint=error.hint) from error
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
    if ignored:
        keys = ", ".join(f"{key} ({number:,})" for key, number in sorted(ignored.items()))
        log(f"{dataset.name}: keys that lines have and training ignores: {keys}")
    is_test = _choose_test(np.array(said), spool)
    return spool.split(np.flatnonzero(~is_test)), spool.split(np.flatnonzero(is_test))


def _choose_test(said: np.ndarray[Any, Any], spool: Spool) -> np.ndarray[Any, Any]:
    """Return which conversations are for testing (n,) bool."""
    prompts = spool.prompts(np.arange(len(said)))
    chosen = (prompts % np.uint64(100)) < TEST_PERCENT
    if not said.any() and not chosen.any() and (prompts != prompts[0]).any():
        chosen = prompts == prompts.min()  # any one would do; the smallest hash is reproducible
    return np.where(said == _UNSAID, chosen, said == _TEST)


def _parse(tree: Any, *, where: str) -> tuple[Conversation, int]:
    """Return a line's conversation and its split, _UNSAID if it has none. Raises DataError."""
    hint = _HINT
    try:
        line = _present(tree) if isinstance(tree, dict) else {"messages": tree}
        if refused := [key for key in REFUSED_KEYS if key in line]:
            hint = "leave it out: weights are keys of messages, and a system message is the first"
            raise TaskError(f"'{refused[0]}' of a line cannot be obeyed")
        messages = line.get("messages")
        if isinstance(messages, list):
            hint = _KEYS_HINT
            messages = [_message(message, i) for i, message in enumerate(messages)]
            hint = _HINT
        conversation: Conversation = {"messages": messages}
        check_conversation(conversation)
        if not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages or ()):
            raise TaskError("the conversation has no answer to learn")
        if (split := line.get("split")) not in (None, *SPLITS):
            raise TaskError(f"split is {shown(split)}, expected one of: {', '.join(SPLITS)}")
    except TaskError as error:
        raise DataError(f"{where}: {error}", hint=hint) from error
    return conversation, {None: _UNSAID, "train": _TRAIN, "test": _TEST}[split]


def _message(message: Any, index: int) -> Any:
    """Return a message with the keys of tasks/base.py. Raises TaskError for one not to be obeyed.

    What is no message is returned as it is.
    """
    if not isinstance(message, dict):
        return message
    present = _present(message)
    weights = {key: present.pop(key) for key in WEIGHT_KEYS if key in present}
    _check_keys(present, ("role", "content"), index)
    for part in message["content"] if isinstance(message.get("content"), list) else ():
        _check_keys(_present(part) if isinstance(part, dict) else {}, ("type", "text"), index)
    kept = {key: message[key] for key in ("role", "content") if key in message}
    for key, weight in weights.items():
        if not isinstance(weight, int | float) or weight not in (0, 1):
            raise TaskError(f"message {index}: {key} is {shown(weight)}, expected 0 or 1")
        if weight and message.get("role") in ("system", "user"):
            raise TaskError(
                f"message {index}: {key} is {weight}, but only an assistant's is learnt"
            )
        if kept.setdefault("weight", int(weight)) != weight:
            raise TaskError(f"message {index}: {' and '.join(weights)} contradict each other")
    return kept


def _check_keys(keys: Mapping[str, Any], known: tuple[str, ...], index: int) -> None:
    if unknown := [key for key in keys if key not in known]:
        raise TaskError(f"message {index} has '{unknown[0]}', which cannot be obeyed")


def _present(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that hold something."""
    return {key: value for key, value in tree.items() if value not in (None, "", [], {})}
