"""HumanEval: functions to write from their signature and docstring, graded by tests (Chen et al.
2021, arXiv:2107.03374).

All examples are for testing. Answers are graded by `tasks.sandbox.humaneval_grader`.
"""

from tasks.base import Conversation, one_turn
from tasks.kinds.sources import HubDataset, HubTask, Row, text


def convert(row: Row) -> Conversation:
    """Convert a row (prompt, canonical_solution, entry_point, test) to a conversation."""
    prompt = text(row, "prompt")
    return one_turn(
        prompt,
        f"{prompt}\n{text(row, 'canonical_solution')}",
        entry_point=text(row, "entry_point"),
        test=text(row, "test"),
    )


TASK = HubTask(
    name="humaneval",
    dataset=HubDataset(
        repository="openai/openai_humaneval",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        files={"test": "openai_humaneval/test-*.parquet"},
    ),
    convert=convert,
    # In tasks.names.GRADERS instead: preparing examples should not import the sandbox.
    grader=None,
)
