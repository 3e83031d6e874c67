"""HumanEval's rows, and the programs that answers are."""

import pytest

from tasks import humaneval
from tasks.base import TaskError, check_conversation
from tasks.sandbox import humaneval_grader

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


def test_a_row_is_a_question_and_the_whole_function_as_its_answer():
    conversation = humaneval.convert(ROW)
    check_conversation(conversation)
    assert [m["content"] for m in conversation["messages"]] == [
        ROW["prompt"],
        f"{ROW['prompt']}\n{ROW['canonical_solution']}",
    ]
    assert (conversation["entry_point"], conversation["test"]) == ("roots", ROW["test"])
    for column in ("prompt", "canonical_solution", "test", "entry_point"):
        with pytest.raises(TaskError, match=f"column '{column}' holds null, expected text"):
            humaneval.convert({**ROW, column: None})


FENCED = {  # a program -> answers that hold it, and perhaps other blocks
    "x = 1": [
        *("\n x = 1 \n", "```\nx = 1\n```", "```python  \n\nx = 1\n\n```", "```\r\nx = 1\r\n```"),
        *("Sure:\n```py\nx = 1\n```", "```Python\nx = 1\n```\nand so on", "~~~\nx = 1\n~~~"),
        *("```PYTHON3 title=a.py\nx = 1\n```", "```{.python}\nx = 1\n```"),
        *("Here: ```python\nx = 1\n```", "Use ```x``` in\n```python\nx = 1\n```"),
        *("It prints ``` so:\n```python\nx = 1\n```", "   ```python\nx = 1\n```"),
        "1. Like so:\n   ```python\n   x = 1\n   ```",
        "Here:\n```python\nx = 1\n```\nand\n```python\ny = 2\n```",
        "```bash\npip install x\n```\nthen this:\n```python\nx = 1\n```",
        "Sure: ```python\nx = 1\n```\nUse:\n```\nf(1)\n```\n",
        "Sure: ```\nx = 1\n```\nOutput:\n```text\n1\n```",
        "`x`, say ```python  \nx = 1\n```\nor ```python\ny = 2\n```",
    ],
    "x = '```'\n```\ny = 2": ["~~~python\nx = '```'\n```\ny = 2\n~~~"],
    "x = 1\n```\ny = 2": ["````python\nx = 1\n```\ny = 2\n````"],
    "def f():\n    '\n    ```\n    '": ["```python\ndef f():\n    '\n    ```\n    '\n```"],
    "if x:\n\n    y = 1\nz = 2": [
        "1. So:\n   ```python\n   if x:\n\n       y = 1\n   z = 2\n   ```"
    ],
    "if x:\n\ty = 1": ["- So:\n\t```py\n\tif x:\n\t\ty = 1\n\t```"],
    "": ["```python\n```"],
}
UNFENCED = [  # the whole answer is the program
    *("x = 1", "", "```python\nx = 1", "``` js\nx\n```"),
    "```js\nx\n```\nprose\n```js\ny\n```",
]


def test_the_program_is_the_first_block_or_the_whole_answer():
    for code, answers in FENCED.items():
        assert [humaneval_grader.code_of(answer) for answer in answers] == [code] * len(answers)
    assert [humaneval_grader.code_of(answer) for answer in UNFENCED] == UNFENCED


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
