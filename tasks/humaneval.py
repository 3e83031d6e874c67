"""HumanEval: functions to be written from their signature, judged by tests (Chen et al. 2021,
arXiv:2107.03374).

All examples are for testing. Answers are graded by `tasks.sandbox.humaneval_grader`.
"""

from tasks.base import Conversation
from tasks.kinds.sources import HubDataset, HubTask, Row, text


def convert(row: Row) -> Conversation:
    """A row (prompt, canonical_solution, entry_point, test) as a conversation."""
    prompt = text(row, "prompt")
    return {
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": f"{prompt}\n{text(row, 'canonical_solution')}"},
        ],
        "entry_point": text(row, "entry_point"),
        "test": text(row, "test"),
    }


TASK = HubTask(
    name="humaneval",
    dataset=HubDataset(
        repository="openai/openai_humaneval",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        files={"test": "openai_humaneval/test-*.parquet"},
    ),
    convert=convert,
    grader=None,  # not here: making examples needs no sandbox
)
