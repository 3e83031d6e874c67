"""Conversations as token ids, with the mask of what an assistant learns, and answers back as text.

The layout is nanochat's. Only what the assistant itself writes has mask 1:

    <|bos|>, then in turns
    <|user_start|> text <|user_end|>
    <|assistant_start|> text and calls <|assistant_end|>

    call:   <|python_start|> expression <|python_end|>     mask 1
            <|output_start|> result <|output_end|>         mask 0, the calculator writes it

A system message is put before the first user message, an empty line between them. Whatever people
type is ordinary text: a special token spelled out in a message never becomes one.
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
    """Ids and mask of a conversation; what is beyond `max_tokens` is cut off.

    mask[i] is 1 where ids[i] is to be predicted by the assistant: its text, its calls and its
    <|assistant_end|>. Raises DataError naming the message when roles do not take turns or a content
    is neither text nor, from an assistant, parts.
    """
    ids, mask = [tokenizer.bos], [0]

    def add(new: Sequence[int], learnt: int) -> None:
        ids.extend(new)
        mask.extend([learnt] * len(new))

    for role, content in _turns(conversation):
        start, end = USER if role == "user" else ASSISTANT
        learnt = int(role == "assistant")
        add([tokenizer.special(start)], 0)
        if isinstance(content, str):
            add(tokenizer.encode(content), learnt)
        else:
            for part in content:
                add(*_render_part(tokenizer, part))
        add([tokenizer.special(end)], learnt)
        if len(ids) >= max_tokens:
            break
    return ids[:max_tokens], mask[:max_tokens]


def render_for_completion(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """Ids up to and including the <|assistant_start|> after which the model answers.

    A last message of the assistant is left out. Nothing is cut: fitting the context is the caller's
    business. Raises DataError like `render_conversation`.
    """
    prompt = prompt_of(conversation)
    ids, _ = render_conversation(tokenizer, prompt, max_tokens=_NO_LIMIT)
    return [*ids, tokenizer.special(ASSISTANT[0])]


def parse_answer(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The ids that a model wrote after <|assistant_start|>, as text for graders and people.

    A call and its result become `<<7+5=12>>`. Reading ends at <|assistant_end|> or <|bos|>; special
    tokens that make no sense where they stand are left out. Takes any ids of the vocabulary.
    """
    return text_of(_parse_parts(tokenizer, ids))


_NO_LIMIT = 2**62


def _turns(conversation: Conversation) -> list[tuple[str, str | list[Part]]]:
    """(role, content) of every message, the system message merged into the first user message."""
    try:
        check_conversation(conversation)
    except TaskError as error:
        raise DataError(str(error), hint="the roles are user and assistant, in turns") from error
    messages = conversation["messages"]
    turns = [(m["role"], m["content"]) for m in messages if m["role"] != "system"]
    if messages[0]["role"] == "system":
        turns[0] = ("user", f"{messages[0]['content']}\n\n{turns[0][1]}")
    return turns


def _render_part(tokenizer: Tokenizer, part: Part) -> tuple[list[int], int]:
    ids = tokenizer.encode(part["text"])
    if part["type"] == "text":
        return ids, 1
    start, end, learnt = WRAPPED[part["type"]]
    return [tokenizer.special(start), *ids, tokenizer.special(end)], learnt


def _parse_parts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Part]:
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
