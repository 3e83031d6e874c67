import json

import pytest

from tasks import arc, gsm8k, mmlu, registry, smoltalk
from tasks.base import TaskError, check_conversation, text_of
from tests.support.tasks.rows import ROWS, rows_of

QUESTION = {
    "question": "Which one is a metal?",
    "subject": "chemistry",
    "choices": ["iron", "wood", "glass", "wool"],
    "answer": 0,
}
SCIENCE = {
    "id": "x",
    "question": "What do plants need?",
    "choices": {"text": ["light", "stone", "salt"], "label": ["1", "2", "3"]},
    "answerKey": "1",
}
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def told(conversation):
    return [(m["role"], text_of(m["content"])) for m in conversation["messages"]]


def test_a_choice_is_put_with_its_letter_behind_it():
    conversation = mmlu.convert(QUESTION)
    assert told(conversation) == [
        (
            "user",
            "Multiple Choice question: Which one is a metal?\n"
            "- iron=A\n- wood=B\n- glass=C\n- wool=D\n"
            "\nRespond only with the letter of the correct answer.",
        ),
        ("assistant", "A"),
    ]
    assert conversation["letters"] == ["A", "B", "C", "D"]
    assert conversation["subject"] == "chemistry"
    assert "- light=1\n- stone=2\n- salt=3\n\n" in told(arc.convert(SCIENCE))[0][1]
    answers, is_correct = ("A", " A\n", "B", "AB", "a", ""), registry.grader_of("mmlu").is_correct
    assert [text for text in answers if is_correct(conversation, text)] == ["A", " A\n"]


def test_a_solution_has_its_calls_as_parts():
    row = {"question": "?", "answer": "12/60 = $<<12/60=0.2>>0.2\n<<1+1=2>><<3>>\n#### 10"}
    content = gsm8k.convert(row)["messages"][1]["content"]
    assert [(part["type"], part["text"]) for part in content] == [
        *(("text", "12/60 = $"), ("python", "12/60"), ("python_output", "0.2"), ("text", "0.2\n")),
        *(("python", "1+1"), ("python_output", "2"), ("text", ""), ("python", "3")),
        *(("python_output", ""), ("text", "\n#### 10")),
    ]


GRADED = {  # the truth -> answers that are right, and wrong ones
    "#### 72": (
        ["so <<48+24=72>>72\n#### 72", "#### 72 apples"],
        ["#### 72.", "#### 72.0", "#### 7", "#### 71\n#### 72", "72", ""],  # the first one counts
    ),
    **{"#### -3": (["#### -3"], ["#### 3"]), "#### 1,234": (["#### 1234"], [])},
    **{"#### 1234": (["#### 1,2,34"], []), "#### 0.5": ([], ["#### .5"])},
    "nobody knows": ([], ["nor do I"]),
}


@pytest.mark.parametrize("truth", GRADED)
def test_a_number_is_right_when_it_is_written_alike_but_for_commas(truth):
    conversation = gsm8k.convert({"question": "?", "answer": f"<<1+1=2>>\n{truth}"})
    is_correct = registry.grader_of("gsm8k").is_correct
    for answers, right in zip(GRADED[truth], (True, False), strict=True):
        assert [a for a in answers if is_correct(conversation, a) != right] == []


def test_a_talk_keeps_its_messages_and_nothing_else():
    system = {"role": "system", "content": "Be brief."}
    assert smoltalk.convert({"messages": [system, *TALK], "source": "x"}) == {
        "messages": [system, *TALK]
    }
    assert smoltalk.convert({"messages": [*TALK, TALK[0]]}) == {"messages": [*TALK, TALK[0]]}


BAD_ROWS = [
    *((mmlu.convert, {**QUESTION, "choices": some}) for some in (None, ["a", None], ["a", "b"])),
    *((mmlu.convert, {**QUESTION, "answer": answer}) for answer in (4, "A")),
    *((mmlu.convert, {**QUESTION, "question": 7}), (arc.convert, {**SCIENCE, "choices": ["a"]})),
    (arc.convert, {**SCIENCE, "answerKey": "A"}),
    (arc.convert, {**SCIENCE, "choices": {"text": ["a"], "label": ["1", "2"]}}),
    (gsm8k.convert, {"question": "?"}),
    *((smoltalk.convert, {"messages": some}) for some in ("hi", ["hi"], [], TALK[:1], TALK[1:])),
    (smoltalk.convert, {"messages": [{"role": "user"}]}),
]


def test_a_row_that_is_no_conversation_is_refused(transcript):
    for convert, row in BAD_ROWS:
        transcript.refused(f"{convert.__module__} {row}"[:90], TaskError, convert, row)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_row_is_a_conversation_whose_own_answer_is_right(name):
    task = registry.task_named(name)
    for row in rows_of(name, 300):
        conversation = task.convert(row)
        check_conversation(conversation)
        assert json.loads(json.dumps(conversation)) == conversation
        if registry.is_gradable(name) and name != "humaneval":  # tests of its own run programs
            answer = text_of(conversation["messages"][-1]["content"])
            assert registry.grader_of(name).is_correct(conversation, answer)
