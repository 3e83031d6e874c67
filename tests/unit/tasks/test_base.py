import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.base import (
    Task,
    TaskError,
    check_conversation,
    distinct,
    final_number,
    parts_of,
    prompt_key,
    prompt_of,
    text_of,
)


def user(text):
    return {"role": "user", "content": text}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_calls_in_text_become_parts_and_text_again():
    text = 'He has <<7+5=12>>12.\n<<"a=b".count("=")=1>>#### 12'
    assert [part["type"] for part in parts_of(text)] == [
        *("text", "python", "python_output"),
        *("text", "python", "python_output", "text"),
    ]
    assert parts_of(text)[4]["text"] == '"a=b".count("=")'
    assert text_of(parts_of(text)) == text


@settings(deadline=None)
@given(st.text(alphabet="<>=1+ #\n", max_size=30))
def test_any_text_survives_being_cut_into_parts(text):
    assert text_of(parts_of(text)) == text


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (["python"], "<<1>>"),
        (["python_output"], "<<=1>>"),
        (["python", "text", "python_output"], "<<1>>1<<=1>>"),
        (["python", "python", "python_output"], "<<1>><<1=1>>"),
        ([], ""),
    ],
)
def test_calls_without_an_answer_and_answers_without_a_call_are_shown(kinds, text):
    assert text_of([{"type": kind, "text": "1"} for kind in kinds]) == text


NUMBERS = {  # a number -> answers that end in it
    "12": [
        *("#### 12", "<<7+5=12>>#### 12", "#### 12.", "#### 12 apples", "#### 12, as I said"),
        *("#### 12)", "#### 12\n1/2", "#### 12\n#### Explanation"),
    ],
    **{"-4": ["first #### 3 then\n#### -4"], "1234567": ["#### 1,234,567"]},
    **{"2.50": ["#### 2.50"], "-1234.5": ["#### -1,234.5!"]},
    None: [
        *("#### 1/2", "#### 1 / 2", "#### 12abc", "#### 3 + 4", "#### 3=3", "#### 50%"),
        *("#### 1,2", "#### 1,23", "#### 12.3.4", "#### 0x1F", "#### 5e3", "#### 12\n#### 13th"),
        *("####12", "### 12", "#### twelve", "#### \u0663", "#### 3\u0663", "#### ", "12", ""),
        "#### 1,\u0661\u0662\u0663",
    ],
}


@pytest.mark.parametrize(("number", "answer"), [(n, a) for n in NUMBERS for a in NUMBERS[n]])
def test_the_final_number_is_that_of_the_last_mark(answer, number):
    assert final_number(answer) == number


def test_a_prompt_is_all_but_the_last_answer():
    conversation = {"messages": [user("a"), assistant("b"), user("c"), assistant("d")], "answer": 1}
    prompt = prompt_of(conversation)
    assert [m["content"] for m in prompt["messages"]] == ["a", "b", "c"]
    assert prompt["answer"] == 1
    assert prompt_of(prompt) == prompt
    assert len(conversation["messages"]) == 4
    assert prompt_key(conversation) == prompt_key(prompt) != prompt_key({"messages": [user("c")]})


def test_a_part_of_a_task_is_a_task_and_parts_of_parts_too():
    examples = [{"messages": [user(str(i))]} for i in range(50)]
    task = Task(name="t", split="train", examples=examples)
    assert (len(task), len(task.first(2)), len(task.first(99)), task.first(2).name) == (
        50,
        2,
        50,
        "t",
    )
    assert list(task.first(2).examples) == examples[:2]
    for part in (slice(3, 40, 4), slice(0, 99, 1), slice(10, 10, 1), slice(-5, None, 2)):
        assert list(task.sliced(part.start, part.stop, part.step).examples) == examples[part]
    assert list(task.sliced(1, None, 3).sliced(2, 9, 2).examples) == examples[1::3][2:9:2]
    assert list(task.examples[5:][::-1]) == examples[5:][::-1]


def test_distinct_examples_run_out_with_an_error_that_counts_them():
    def endless():
        while True:
            for i in range(3):
                yield {"messages": [user(str(i))]}

    assert len(list(distinct(endless(), 3, what="x"))) == 3
    with pytest.raises(TaskError, match="x has about 3 different examples, 4 were asked for"):
        list(distinct(endless(), 4, what="x"))


PART = {"type": "text", "text": "a"}
NO_CONVERSATION = [
    *(None, [], ["hi"], [{"role": "user"}], [assistant("a")], [user("a"), user("b")]),
    *([user("a"), {"role": role, "content": "b"}] for role in ("tool", "system")),
    *([{"role": "system", "content": "b"}], [user([PART])], [user("a"), assistant(None)]),
    *([user("a"), {**assistant("a"), "weight": weight}] for weight in (2, None)),
    *([{**user("a"), "weight": 1}], [user("a"), assistant(PART)]),
    *([user("a"), assistant([PART | more])] for more in ({"type": "image"}, {"text": 1})),
]


def test_what_is_no_conversation_is_refused_by_message(transcript):
    for messages in NO_CONVERSATION:
        transcript.refused(str(messages), TaskError, check_conversation, {"messages": messages})
