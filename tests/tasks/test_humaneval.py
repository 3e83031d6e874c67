import pytest

from tasks import humaneval, registry
from tasks.base import TaskError, check_conversation
from tasks.sandbox import humaneval_grader
from tasks.sandbox.run import protections

ROW = {
    "task_id": "Made/0",
    "prompt": "from typing import List\nimport math\n\n\n"
    "def roots(xs: List[float]) -> List[float]:\n"
    '    """Square roots.\n    >>> roots([4.0])\n    [2.0]\n    """\n',
    "canonical_solution": "    return [math.sqrt(x) for x in xs]\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([4.0]) == [2.0]\n"
    "    assert candidate([]) == []\n    assert math.fabs(candidate([2.0])[0] - 1.41421) < 1e-4\n",
    "entry_point": "roots",
}
PAIR = {  # a test that calls a function which the prompt gives
    "task_id": "Made/1",
    "prompt": "def encode(s: str):\n    return s[::-1]\n\n\ndef decode(s: str):\n"
    '    """The reverse of encode."""\n',
    "canonical_solution": "    return s[::-1]\n",
    "test": "def check(candidate):\n    assert candidate(encode('abc')) == 'abc'\n",
    "entry_point": "decode",
}
BODY = "def roots(xs):\n    return [math.sqrt(x) for x in xs]"


@pytest.fixture
def sandbox():
    try:
        protections()
    except TaskError as error:
        pytest.skip(str(error))


def test_a_row_is_a_question_and_the_whole_function_as_its_answer():
    conversation = humaneval.convert(ROW)
    check_conversation(conversation)
    assert [m["content"] for m in conversation["messages"]] == [
        ROW["prompt"],
        f"{ROW['prompt']}\n{ROW['canonical_solution']}",
    ]
    assert (conversation["entry_point"], conversation["test"]) == ("roots", ROW["test"])


@pytest.mark.parametrize("column", ["prompt", "canonical_solution", "test", "entry_point"])
def test_a_row_without_a_column_is_refused(column):
    with pytest.raises(TaskError, match=f"column '{column}' holds nothing, expected text"):
        humaneval.convert({**ROW, column: None})


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("\n x = 1 \n", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nand\n```python\ny = 2\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python  \n\nx = 1\n\n```", "x = 1"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("``` js\nx\n```", "``` js\nx\n```"),
        ("", ""),
    ],
)
def test_the_program_is_the_first_block_or_the_whole_answer(answer, code):
    assert humaneval_grader.code_of(answer) == code


@pytest.mark.parametrize(
    ("prompt", "imports"),
    [
        ("import a\nfrom b import c\n\ndef f():\n    import d\n", "import a\nfrom b import c"),
        ("# why\n\n  import a\ndef f(): pass\nimport b\n", "import a"),
        ("def f(): pass\nimport b\n", ""),
    ],
)
def test_a_prompts_first_imports_go_before_the_program(prompt, imports):
    conversation = {**humaneval.convert(ROW), "messages": [{"role": "user", "content": prompt}]}
    assert humaneval_grader.program_of(conversation, "x = 1") == f"{imports}\n\nx = 1\n"


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
def test_an_answer_is_right_when_its_function_passes_the_tests(sandbox, answer, right):
    assert registry.grader_of("humaneval").is_correct(humaneval.convert(ROW), answer) == right


def test_what_a_test_calls_beside_the_answer_has_to_be_in_the_answer(sandbox):
    conversation = humaneval.convert(PAIR)
    whole = conversation["messages"][1]["content"]
    assert humaneval_grader.is_correct(conversation, whole)
    assert not humaneval_grader.is_correct(conversation, "def decode(s): return s[::-1]")
    assert not humaneval_grader.is_correct(
        conversation, whole.replace("[::-1]", "").replace("s\n", "0\n")
    )


@pytest.mark.parametrize(
    ("prompt", "test", "needed"),
    [
        ("def f(x):\n    '''f'''\n", "def check(g): assert g(1)", False),
        ("from typing import List\ndef f(x: List):\n    pass\n", "def check(g): g(1)", False),
        ("import math\ndef f(x):\n    pass\n", "def check(g): assert g(math.pi)", True),
        ("from math import *\ndef f(x):\n    pass\n", "def check(g): assert g(pi)", True),
        ("import os.path as p\ndef f(x):\n    pass\n", "def check(g): p.join(g)", True),
        ("def h(x): return x\ndef f(x):\n    pass\n", "def check(g): assert g(h(1))", True),
        ("N = 3\ndef f(x):\n    pass\n", "def check(g): assert g(1) == N", True),
        ("class A: pass\ndef f(x):\n    pass\n", "def check(g): assert g(A)", True),
        ("def f(x):\n    pass\n", "def check(g): assert f is g", False),  # the tester's own
    ],
)
def test_a_prompt_runs_before_its_test_when_that_uses_something_of_it(prompt, test, needed):
    conversation = {**humaneval.convert(ROW), "test": test, "entry_point": "f"}
    conversation["messages"] = [{"role": "user", "content": prompt}]
    assert humaneval_grader.check_of(conversation).setup == (prompt if needed else "")


def test_there_are_only_examples_for_testing():
    assert humaneval.TASK.dataset.files.keys() == {"test"}
    assert registry.is_gradable("humaneval")
