"""Grade answers to HumanEval: model-written code runs in `tasks.sandbox.run` only."""

import re
from collections.abc import Sequence
from textwrap import dedent

from tasks.base import Conversation
from tasks.kinds.sources import Grader
from tasks.sandbox.process import Check
from tasks.sandbox.run import protections, run_all

# nanochat's limits, as scores depend on them.
SECONDS = 5.0
MEMORY_MB = 256

# Text may precede a fence in its line if nanochat knows it: ``` or ```python.
_BLOCK = re.compile(
    r"^([ \t]*)(?:\S[^\n]*?(?=```(?:python)?\s*\n))??(```+|~~~+)[ \t]*([^\n`]*)\n(.*?)^(?:\1)?\2",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = frozenset(("", "python", "py", "python3", "py3"))  # in small letters


def is_correct(conversation: Conversation, answer: str) -> bool:
    """Return whether the program in `answer` passes. Raises TaskError without a sandbox."""
    return are_correct([(conversation, answer)])[0]


def are_correct(graded: Sequence[tuple[Conversation, str]]) -> list[bool]:
    """Return whether the programs in answers pass their tests; one runs per CPU at a time.

    Raises TaskError without a sandbox.
    """
    runs = [
        (program_of(conversation, answer), check_of(conversation))
        for conversation, answer in graded
    ]
    return [verdict.passed for verdict in run_all(runs, seconds=SECONDS, memory_mb=MEMORY_MB)]


def program_of(conversation: Conversation, answer: str) -> str:
    """Return the program to test: the prompt's imports, then the answer's code."""
    return f"{_imports(conversation['messages'][0]['content'])}\n\n{code_of(answer)}\n"


def check_of(conversation: Conversation) -> Check:
    """Return the tests, with the prompt as setup if they use other names that it defines."""
    prompt, test = conversation["messages"][0]["content"], conversation["test"]
    entry_point = conversation["entry_point"]
    try:
        names = {*compile(prompt, "<prompt>", "exec").co_names} - {entry_point}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        names = set[str]()
    # Only then: the prompt imports `typing`, which takes as long as starting an interpreter.
    is_used = "import *" in prompt or not names.isdisjoint(re.findall(r"\w+", test))
    return Check(setup=prompt if is_used else "", test=test, entry_point=entry_point)


def code_of(answer: str) -> str:
    """Return the first fenced block of Python or of no named language; all of it if none has one.

    nanochat knows the fences ``` and ```python only, and takes what is between two others for the
    program: its answers in other fences fail, and here they run. All else is its rule.
    """
    for indent, _, info, code in _BLOCK.findall(answer):
        if "".join(info.split()[:1]).strip("{.}").lower() in _PYTHON:
            return (dedent(code) if indent else code).strip()
    return answer.strip()


def _imports(prompt: str) -> str:
    """Return the imports at the beginning of a prompt."""
    imports: list[str] = []
    for line in map(str.strip, prompt.split("\n")):
        if line.startswith(("import ", "from ")):
            imports.append(line)
        elif line and not line.startswith("#"):
            break
    return "\n".join(imports)


GRADER = Grader(
    is_correct=is_correct, baseline=0.0, are_correct=are_correct, check_machine=protections
)
