"""MMLU: multiple choice over 57 subjects (Hendrycks et al. 2021, arXiv:2009.03300).

Training is its auxiliary split, questions collected from ARC, MC_TEST, OBQA and RACE.
"""

from tasks.base import Conversation, TaskError
from tasks.kinds import multiple_choice
from tasks.kinds.sources import HubDataset, HubTask, Row, text, texts

LETTERS = ("A", "B", "C", "D")


def convert(row: Row) -> Conversation:
    """Convert a row (question, subject, choices, answer as an index) to a conversation."""
    choices, answer = texts(row, "choices"), row.get("answer")
    if len(choices) != len(LETTERS):
        raise TaskError(f"{len(choices)} choices, expected {len(LETTERS)}")
    if type(answer) is not int or not 0 <= answer < len(LETTERS):
        raise TaskError(f"answer is {answer!r}, expected 0 to {len(LETTERS) - 1}")
    return multiple_choice.make_conversation(
        text(row, "question"), LETTERS, choices, LETTERS[answer], subject=text(row, "subject")
    )


TASK = HubTask(
    name="mmlu",
    dataset=HubDataset(
        repository="cais/mmlu",
        revision="c30699e8356da336a370243923dbaf21066bb9fe",
        files={"train": "all/auxiliary_train-*.parquet", "test": "all/test-*.parquet"},
    ),
    convert=convert,
    grader=multiple_choice.grader(baseline=1 / len(LETTERS)),
)
