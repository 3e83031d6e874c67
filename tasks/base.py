"""The types of tasks and conversations, and their conversion to text.

A task is the conversations of one split of a dataset, with a way to grade answers.

A conversation is a dictionary of plain JSON values:

    {"messages": [{"role": "user", "content": "..."},
                  {"role": "assistant", "content": "..." or [part, ...]}],
     "answer": "12"}                               keys other than `messages` are the grader's

Roles are `system` (at most one, first), `user` and `assistant`, the last two alternating. A part is
{"type": "text" | "python" | "python_output", "text": ...}: `python` is a call of the calculator
and `python_output` its result. An assistant's message with "weight": 0 is context: it is not
learnt.

Written as plain text, a call and its result are `<<7+5=12>>`, as in the GSM8K dataset. Graders see
answers in that form.
"""

import hashlib
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias, overload

Conversation: TypeAlias = dict[str, Any]
Part: TypeAlias = dict[str, str]

SPLITS = ("train", "test")
PART_TYPES = ("text", "python", "python_output")

_CALL = re.compile(r"<<([^<>]+)=([^<>=]*)>>")
_FIRST = re.compile(r"#### (-?[0-9.,]+)")
_FINAL = re.compile(r"#### (-?[0-9].*)")
# Not the beginning of a word, a list, a fraction or a sum.
_NUMBER = re.compile(
    r"(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)"
    r"(?![\w%/]|[.,]\d|[ \t]*[-+*/^=][ \t]*\d)"
)
_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}
_REPEATS_IN_A_ROW = 1000  # after which a generator counts as exhausted


class TaskError(ValueError):
    """A dataset that cannot be used, or a task that does not exist. One line."""


def kind_of(value: object) -> str:
    """Return what a value of JSON is, with its article."""
    return _NAMES.get(type(value), f"a {type(value).__name__}")


class Conversations(Sequence[Conversation]):
    """A sequence whose conversations are read on access; a slice is a `View`."""

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> "View": ...
    def __getitem__(self, index: int | slice) -> "Conversation | View":
        """Return one conversation, or a view of a part."""
        return self.part(index) if isinstance(index, slice) else self.read(index)

    @abstractmethod
    def read(self, index: int) -> Conversation:
        """Return one conversation."""

    def part(self, index: slice) -> "View":
        """Return a view of a part."""
        return View(self, range(len(self))[index])


class View(Conversations):
    """A selection of another sequence's conversations, in any order."""

    def __init__(self, examples: Sequence[Conversation], places: Sequence[int]) -> None:
        self._examples = examples
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Conversation:
        """Return one conversation."""
        return self._examples[self._places[index]]

    def part(self, index: slice) -> "View":
        """Return a view of a part, which is pickled without the places of the rest."""
        return View(self._examples, self._places[index])


@dataclass(frozen=True, kw_only=True)
class Task:
    """The examples of one split of one dataset, in a fixed order."""

    name: str
    split: str  # "train" or "test"
    examples: Sequence[Conversation]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Conversation:
        return self.examples[index]

    def sliced(self, start: int = 0, stop: int | None = None, step: int = 1) -> Self:
        """Return every `step`-th example from `start` to before `stop`, as in a slice of a list."""
        return replace(self, examples=View(self.examples, range(len(self))[start:stop:step]))

    def first(self, num_examples: int) -> Self:
        """Return the first `num_examples`, or all if there are fewer."""
        return self.sliced(stop=num_examples)


def one_turn(question: str, answer: str | list[Part], /, **keys: object) -> Conversation:
    """Return the conversation of a question and its answer, with `keys` for the grader."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **keys}


def prompt_of(conversation: Conversation) -> Conversation:
    """Return the conversation without its last message, if that is an assistant's."""
    messages = conversation["messages"]
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return {**conversation, "messages": messages}


def prompt_key(conversation: Conversation) -> str:
    """Return all text before the last answer: the identity of what a conversation asks."""
    messages = prompt_of(conversation)["messages"]
    return "\n".join(f"{m['role']}: {text_of(m['content'])}" for m in messages)


def text_of(content: str | Sequence[Mapping[str, str]]) -> str:
    """Return a message's content as plain text, calls written `<<expression=result>>`."""
    if isinstance(content, str):
        return content
    pieces: list[str] = []
    open_call = False
    for part in content:
        kind, text = part["type"], part["text"]
        if open_call and kind != "python_output":  # a call without a result
            pieces.append(">>")
        if kind == "python":
            pieces.append(f"<<{text}")
        elif kind == "python_output":
            pieces.append(f"={text}>>" if open_call else f"<<={text}>>")
        else:
            pieces.append(text)
        open_call = kind == "python"
    return "".join(pieces) + (">>" if open_call else "")


def parts_of(text: str) -> list[Part]:
    """Split text with `<<expression=result>>` calls into parts; the inverse of `text_of`."""
    parts: list[Part] = []
    end = 0
    for call in _CALL.finditer(text):
        if call.start() > end:
            parts.append({"type": "text", "text": text[end : call.start()]})
        parts.append({"type": "python", "text": call[1]})
        parts.append({"type": "python_output", "text": call[2]})
        end = call.end()
    if end < len(text):
        parts.append({"type": "text", "text": text[end:]})
    return parts


def final_number(answer: str) -> str | None:
    """Return the number of the last `#### n` in `answer`, without thousands separators, or None.

    None also if that is not one number: `#### 1/2`, `#### 12abc`.
    """
    # The last one: an answer that corrects itself counts as corrected.
    found = _FINAL.findall(answer)
    number = _NUMBER.match(found[-1]) if found else None
    return number[1].replace(",", "") if number else None


def is_final_number(conversation: Conversation, answer: str) -> bool:
    """Return whether the last `#### n` of `answer` is the "answer"; separators do not matter."""
    return final_number(answer) == conversation["answer"]


def first_number(answer: str) -> str | None:
    """Return the n of the first `#### n`, without commas, or None."""
    # GSM8K's own rule, and nanochat's, so that scores are comparable: 5 and 5.0 are different
    # answers, and 12abc and 12 are one. It is the reward of RL too, as in nanochat.
    found = _FIRST.search(answer)
    return found[1].replace(",", "") if found else None


def is_first_number(conversation: Conversation, answer: str) -> bool:
    """Return whether the first `#### n` of both are equal as text, except for commas."""
    expected = first_number(text_of(conversation["messages"][-1]["content"]))
    return expected is not None and first_number(answer) == expected


def is_held_out(text: str, *, percent: int) -> bool:
    """Return whether a text is one of the `percent` for testing; it depends on nothing else."""
    # A hash, not a random generator: the split of an example must not depend on a seed.
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8]) % 100 < percent


def distinct(
    examples: Iterator[Conversation], num_examples: int, *, what: str
) -> Iterator[Conversation]:
    """Yield the first `num_examples` of an endless stream with distinct prompts.

    Raises TaskError, naming `what`, if the stream has no more of them.
    """
    seen: set[str] = set()
    misses = 0
    while len(seen) < num_examples:
        example = next(examples)
        key = prompt_key(example)
        if key not in seen:
            seen.add(key)
            misses = 0
            yield example
            continue
        # A stream cannot say that it has no more, so many repeats in a row are taken as its end.
        misses += 1
        if misses == _REPEATS_IN_A_ROW:
            raise TaskError(
                f"{what} has about {len(seen)} different examples, {num_examples} were asked for"
            )


def check_split(split: str) -> None:
    """Raise TaskError unless `split` is one of `SPLITS`."""
    if split not in SPLITS:
        raise TaskError(f"there is no split '{split}' (one of: {', '.join(SPLITS)})")


def check_conversation(value: object) -> None:
    """Raise TaskError, naming the message and its fault, unless `value` is a conversation."""
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise TaskError("a conversation needs a list of 'messages'")
    turn = 0
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise TaskError(f"message {i} needs 'role' and 'content'")
        if message["role"] == "system" and i == 0:
            _check_content(message["content"], i, parts_allowed=False)
            _check_weight(message, i)
            continue
        expected = ("user", "assistant")[turn % 2]
        if message["role"] != expected:
            raise TaskError(f"message {i} is of role {message['role']!r}, expected '{expected}'")
        _check_content(message["content"], i, parts_allowed=expected == "assistant")
        _check_weight(message, i)
        turn += 1
    if turn == 0:
        raise TaskError("a conversation needs a user's message")


def _check_weight(message: Mapping[str, object], index: int) -> None:
    weight = message.get("weight", int(message["role"] == "assistant"))
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise TaskError(f"message {index}: weight is {weight!r}, expected 0 or 1")
    if weight and message["role"] != "assistant":
        raise TaskError(
            f"message {index}: weight is 1, but only an assistant's messages are learnt"
        )


def _check_content(content: object, index: int, *, parts_allowed: bool) -> None:
    if isinstance(content, str):
        return
    if not parts_allowed or not isinstance(content, list | tuple):
        expected = "text or a list of parts" if parts_allowed else "text"
        raise TaskError(f"message {index}: content is {kind_of(content)}, expected {expected}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in PART_TYPES:
            raise TaskError(
                f"message {index}: {part!r} is not a part (types: {', '.join(PART_TYPES)})"
            )
        if not isinstance(part.get("text"), str):
            raise TaskError(f"message {index}: a part of type '{part['type']}' needs text")
