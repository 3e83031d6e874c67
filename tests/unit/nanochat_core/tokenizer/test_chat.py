import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_core.errors import DataError
from nanochat_core.tokenizer.bpe import SPECIAL_TOKENS, Tokenizer
from nanochat_core.tokenizer.chat import parse_answer, render_conversation, render_for_completion
from tasks.base import PART_TYPES, prompt_of, text_of
from tasks.kinds.sources import GeneratedTask
from tasks.names import TASKS
from tasks.registry import generate, grader_of, is_gradable, task_named
from tests.support.tasks.rows import ROWS, rows_of

MANY = 10**6
MADE = sorted(name for name in TASKS if isinstance(task_named(name), GeneratedTask))


def example_of(name, seed):
    if name in ROWS:
        [row] = rows_of(name, 1, seed=seed)
        return task_named(name).convert(row)
    return next(generate(name, "train", 1, grade=1 + seed % 3, seed=seed))


def words():
    for name in TASKS:
        for seed in range(20):
            for message in example_of(name, seed)["messages"]:
                yield text_of(message["content"])


TOKENIZER = Tokenizer.train(words(), vocab_size=420)
BOS, USER, USER_END, ASSISTANT, ASSISTANT_END, PYTHON, PYTHON_END, OUTPUT, OUTPUT_END = (
    TOKENIZER.special(name) for name in SPECIAL_TOKENS
)


def chat(*contents, system=None):
    """User and assistant in turns, after a system message if there is one."""
    first = [] if system is None else [{"role": "system", "content": system}]
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return {"messages": first + turns}


def part(kind, text):
    return {"type": kind, "text": text}


def test_an_answer_of_weight_0_is_context_and_is_not_learnt():
    answer = [part("text", "x"), part("python", "1+1"), part("python_output", "2")]
    talk = chat("q", answer, "r", "z", "s", answer, system="be")
    full_ids, full = render_conversation(TOKENIZER, talk, max_tokens=MANY)
    first_end = full_ids.index(ASSISTANT_END) + 1
    for weights, expected in (
        ((0, 1, 1), [0] * first_end + full[first_end:]),
        ((1, 1, 1), full),
        ((0, 0, 0), [0] * len(full)),
    ):
        for message, weight in zip(talk["messages"][2::2], weights, strict=True):
            message["weight"] = weight
        assert render_conversation(TOKENIZER, talk, max_tokens=MANY) == (full_ids, expected)


def test_a_system_message_is_put_before_the_first_question_of_a_prompt():
    conversation = chat("Hi", "Hello", "Bye", "See you", system="Be brief.")
    before = str(conversation)
    merged = render_for_completion(TOKENIZER, chat("Be brief.\n\nHi", "Hello", "Bye", "See you"))
    assert render_for_completion(TOKENIZER, conversation) == merged
    assert str(conversation) == before


@pytest.mark.parametrize("max_tokens", [1, 2, 10, 17, 10_000])
def test_what_is_too_long_is_cut_at_the_end(max_tokens):
    conversation = chat("What is 7 + 5?", "It is 12.", "And 8?", "No.")
    ids, mask = render_conversation(TOKENIZER, conversation, max_tokens=MANY)
    cut = render_conversation(TOKENIZER, conversation, max_tokens=max_tokens)
    assert cut == (ids[:max_tokens], mask[:max_tokens])


@pytest.mark.parametrize("name", MADE)
def test_an_answer_completes_its_prompt_is_read_back_from_its_ids_and_is_right(name):
    for conversation in generate(name, "test", 100, grade=3, seed=1):
        prompt = render_for_completion(TOKENIZER, conversation)
        assert prompt == render_for_completion(TOKENIZER, prompt_of(conversation))
        ids, _ = render_conversation(TOKENIZER, conversation, max_tokens=MANY)
        assert ids[: len(prompt)] == prompt
        assert prompt[-1] == ASSISTANT
        answer = parse_answer(TOKENIZER, ids[len(prompt) :])
        assert answer == text_of(conversation["messages"][-1]["content"])
        assert answer == parse_answer(TOKENIZER, ids[len(prompt) : -1])
        assert not is_gradable(name) or grader_of(name).is_correct(conversation, answer)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([ASSISTANT_END, 65], ""),
        ([65, BOS, 66], "{65}"),
        ([65, PYTHON, 66], "{65}<<{66}>>"),
        ([PYTHON, 65, PYTHON_END, OUTPUT, 66], "<<{65}={66}>>"),
        ([OUTPUT, 65, OUTPUT_END], "<<={65}>>"),
        ([65, USER, 66, PYTHON_END, 67], "{65}{66}{67}"),
        ([PYTHON, PYTHON_END], "<<>>"),
    ],
)
def test_malformed_answers_are_read_as_far_as_they_go(ids, text):
    letters = {f"{{{i}}}": TOKENIZER.decode([i]) for i in (65, 66, 67)}
    for name, letter in letters.items():
        text = text.replace(name, letter)
    assert parse_answer(TOKENIZER, ids) == text


def test_no_answer_makes_the_reader_fail():
    rng = random.Random(0)
    for _ in range(500):
        ids = rng.choices([*range(300), *range(BOS, BOS + 9)], k=20)
        assert isinstance(parse_answer(TOKENIZER, ids), str)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "needs a list of 'messages'"),
        ([*chat("a", "b")["messages"], {"role": "assistant", "content": "c"}], "message 2 is of"),
        (chat("a", [part("image", "c")])["messages"], "message 1: .* is not a part"),
    ],
)
def test_what_is_no_conversation_is_refused_by_message(messages, message):
    for render in (
        lambda c: render_conversation(TOKENIZER, c, max_tokens=MANY),
        lambda c: render_for_completion(TOKENIZER, c),
    ):
        with pytest.raises(DataError, match=message) as error:
            render({"messages": [*messages, {"role": "user", "content": "z"}] if messages else []})
        assert error.value.hint is not None


# Nothing is lost, repeated, or learnt that the assistant did not write.

anything = st.text(max_size=12) | st.sampled_from(SPECIAL_TOKENS)
parts = st.lists(
    st.builds(
        lambda kind, text: {"type": kind, "text": text}, st.sampled_from(PART_TYPES), anything
    )
)


@st.composite
def talks(draw):
    """A conversation as a person's own file may have it."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(anything)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(anything)})
        messages.append({"role": "assistant", "content": draw(anything | parts)})
    return {"messages": messages[: len(messages) - draw(st.integers(0, 1))]}


def reread(ids):
    """(region, text) pieces and the expected mask, read off the token stream by its wrappers.

    An automaton of its own: it knows the nine special tokens and nothing of the renderer.
    """
    starts = {USER: USER_END, ASSISTANT: ASSISTANT_END, PYTHON: PYTHON_END, OUTPUT: OUTPUT_END}
    names = {USER: "user", ASSISTANT: "assistant", PYTHON: "python", OUTPUT: "output"}
    assert ids[0] == BOS
    open_regions, pieces, mask = [], [], [0]
    for token in ids[1:]:
        assert token != BOS
        if token in starts:
            assert (names[token] in ("python", "output")) == bool(open_regions)
            mask.append(int(token == PYTHON))
            open_regions.append(token)
            pieces.append((names[token], []))
            continue
        region = open_regions[-1]
        mask.append(int(region in (ASSISTANT, PYTHON)))
        if token == starts[region]:
            open_regions.pop()
            if open_regions:
                pieces.append(("assistant", []))
        else:
            assert token < BOS
            pieces[-1][1].append(token)
    assert not open_regions
    return [(name, TOKENIZER.decode(held)) for name, held in pieces], mask


def pieces_of(conversation):
    """What `reread` should find, from the conversation."""
    system = ""
    for message in conversation["messages"]:
        role, content = message["role"], message["content"]
        if role == "system":
            system = f"{content}\n\n"
            continue
        if isinstance(content, str):
            yield role, system + content
            system = ""
            continue
        text = ""
        for item in content:
            if item["type"] == "text":
                text += item["text"]
                continue
            yield "assistant", text
            yield {"python": "python", "python_output": "output"}[item["type"]], item["text"]
            text = ""
        yield "assistant", text


@settings(deadline=None, max_examples=200)
@given(talks())
def test_the_mask_covers_what_the_assistant_writes_and_nothing_else(conversation):
    ids, mask = render_conversation(TOKENIZER, conversation, max_tokens=MANY)
    pieces, expected = reread(ids)
    assert pieces == list(pieces_of(conversation))
    assert mask == expected
