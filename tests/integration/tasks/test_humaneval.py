"""Answers to HumanEval, in the sandbox."""

import pytest

from tasks import humaneval, registry
from tasks.sandbox import humaneval_grader
from tests.integration.tasks.test_sandbox import needs_a_sandbox
from tests.support.tasks.humaneval_row import ROW

__all__ = ["needs_a_sandbox"]

PAIR = {  # a test that calls a function which the prompt gives
    "task_id": "Made/1",
    "prompt": "def encode(s: str):\n    return s[::-1]\n\n\ndef decode(s: str):\n"
    '    """The reverse of encode."""\n',
    "canonical_solution": "    return s[::-1]\n",
    "test": "def check(candidate):\n    assert candidate(encode('abc')) == 'abc'\n",
    "entry_point": "decode",
}


BODY = "def roots(xs):\n    return [math.sqrt(x) for x in xs]"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (ROW["prompt"] + "\n" + ROW["canonical_solution"], True),
        (BODY, True),
        (f"Sure!\n```python\n{BODY}\n```\nIt takes roots.", True),
        (f"```\n{BODY}\n```\n```\ndef roots(xs): return 1\n```", True),
        (BODY.replace("sqrt", "cbrt_of"), False),
        (BODY.replace("return", "yield"), False),
        (BODY.replace("roots", "root"), False),
        (ROW["canonical_solution"], False),
        (f"I think that it is {BODY}", False),
        ("import os; os._exit(0)", False),
        (f"{BODY}\nraise SystemExit(0)", False),
        (f"{BODY}\nif __name__ == '__main__':\n    print(roots([9]))", True),
        (f"{BODY}\nif __name__ == '__main__':\n    assert not roots([9])", False),
        (f"{BODY}\nx = bytearray(300 << 20)", False),
        ("", False),
    ],
)
def test_an_answer_is_right_when_its_function_passes_the_tests(answer, right):
    assert registry.grader_of("humaneval").is_correct(humaneval.convert(ROW), answer) == right


def test_what_a_test_calls_beside_the_answer_has_to_be_in_the_answer():
    conversation = humaneval.convert(PAIR)
    whole = conversation["messages"][1]["content"]
    assert humaneval_grader.is_correct(conversation, whole)
    assert not humaneval_grader.is_correct(conversation, "def decode(s): return s[::-1]")
    assert not humaneval_grader.is_correct(
        conversation, whole.replace("[::-1]", "").replace("s\n", "0\n")
    )
