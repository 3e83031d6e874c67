"""Render conversations as token ids with a loss mask, and parse a model's answer back to text.

The layout is nanochat's. Only what the assistant itself writes has mask 1:

    <|bos|>, then in turns
    <|user_start|> text <|user_end|>
    <|assistant_start|> text and calls <|assistant_end|>

    call:   <|python_start|> expression <|python_end|>     mask 1
            <|output_start|> result <|output_end|>         mask 0, the calculator writes it

A system message is prepended to the first user message, with an empty line between them. Message
text is always ordinary text: a special token spelled out in a message never becomes one.
"""

from collections.abc import Sequence

from nanochat_core.errors import DataError
from nanochat_core.tokenizer.bpe import BOS, Tokenizer
from tasks.base import Conversation, Part, TaskError, check_conversation, prompt_of, text_of

USER = ("<|user_start|>", "<|user_end|>")
ASSISTANT = ("<|assistant_start|>", "<|assistant_end|>")
# part type -> the tokens around it, whether the assistant writes it
WRAPPED = {
    "python": ("<|python_start|>", "<|python_end|>", 1),
    "python_output": ("<|output_start|>", "<|output_end|>", 0),
}


def render_conversation(
    tokenizer: Tokenizer, conversation: Conversation, *, max_tokens: int
) -> tuple[list[int], list[int]]:
    """Return ids and mask of a conversation, truncated to `max_tokens`.

    mask[i] is 1 if ids[i] is a token that the assistant learns to predict: its text, its calls and
    its <|assistant_end|>, unless the message has weight 0. Raises DataError naming the message if
    roles do not alternate or a content is neither text nor, from an assistant, parts.
    """
    ids, mask = [tokenizer.bos], [0]

    def add(new: Sequence[int], learnt: int) -> None:
        ids.extend(new)
        mask.extend([learnt] * len(new))

    for role, content, learnt in _turns(conversation):
        start, end = USER if role == "user" else ASSISTANT
        add([tokenizer.special(start)], 0)
        if isinstance(content, str):
            add(tokenizer.encode(content), learnt)
        else:
            for part in content:
                part_ids, by_assistant = _render_part(tokenizer, part)
                add(part_ids, learnt and by_assistant)
        add([tokenizer.special(end)], learnt)  # the assistant learns to end its answer
        if len(ids) >= max_tokens:  # the rest would be cut off: do not encode it
            break
    return ids[:max_tokens], mask[:max_tokens]


def render_for_completion(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """Return the prompt's ids up to and including the <|assistant_start|> that begins the answer.

    A last message of the assistant is left out. Nothing is truncated: the caller checks that the
    prompt fits the context. Raises DataError like `render_conversation`.
    """
    prompt = prompt_of(conversation)
    ids, _ = render_conversation(tokenizer, prompt, max_tokens=_NO_LIMIT)
    return [*ids, tokenizer.special(ASSISTANT[0])]


def parse_answer(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Convert the ids that a model generated after <|assistant_start|> to text.

    A call and its result become `<<7+5=12>>`. The answer ends at <|assistant_end|> or <|bos|>;
    misplaced special tokens are dropped. Takes any ids of the vocabulary.
    """
    return text_of(parse_parts(tokenizer, ids))


_NO_LIMIT = 2**62


def _turns(conversation: Conversation) -> list[tuple[str, str | list[Part], int]]:
    """Return (role, content, 1 if it is learnt) of all messages.

    The system message is merged into the first user's.
    """
    try:
        check_conversation(conversation)
    except TaskError as error:
        raise DataError(str(error), hint="the roles are user and assistant, in turns") from error
    messages = conversation["messages"]
    turns = [
        (m["role"], m["content"], int(m.get("weight", m["role"] == "assistant")))
        for m in messages
        if m["role"] != "system"
    ]
    if messages[0]["role"] == "system":
        turns[0] = ("user", f"{messages[0]['content']}\n\n{turns[0][1]}", 0)
    return turns


def _render_part(tokenizer: Tokenizer, part: Part) -> tuple[list[int], int]:
    ids = tokenizer.encode(part["text"])
    if part["type"] == "text":
        return ids, 1
    start, end, learnt = WRAPPED[part["type"]]
    return [tokenizer.special(start), *ids, tokenizer.special(end)], learnt


def parse_parts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Part]:
    """Return the parts of an answer, see `parse_answer`."""
    ends = {tokenizer.special(ASSISTANT[1]), tokenizer.special(BOS)}
    starts = {tokenizer.special(start): kind for kind, (start, _, _) in WRAPPED.items()}
    first_special = min(ends)  # special tokens have the last ids, bos is the first of them
    parts: list[Part] = []
    kind, held = "text", list[int]()

    def close() -> None:
        if held or kind != "text":
            parts.append({"type": kind, "text": tokenizer.decode(held)})
        held.clear()

    for token in ids:
        if token in ends:
            break
        if token < first_special:
            held.append(token)
            continue
        close()
        kind = starts.get(token, "text")
    close()
    return parts
