"""ARC: grade-school science questions, an easy and a challenge set (Clark et al. 2018,
arXiv:1803.05457).
"""

from tasks.base import Conversation, TaskError
from tasks.kinds import multiple_choice
from tasks.kinds.sources import HubDataset, HubTask, Row, text, texts


def convert(row: Row) -> Conversation:
    """Convert a row (question, choices with text and label, answerKey) to a conversation."""
    choices = row.get("choices")
    if not isinstance(choices, dict):
        raise TaskError("column 'choices' holds no texts and labels")
    return multiple_choice.make_conversation(
        text(row, "question"),
        texts(choices, "label"),
        texts(choices, "text"),
        text(row, "answerKey"),
    )


def _task(name: str, subset: str) -> HubTask:
    return HubTask(
        name=name,
        dataset=HubDataset(
            repository="allenai/ai2_arc",
            revision="210d026faf9955653af8916fad021475a3f00453",
            files={split: f"{subset}/{split}-*.parquet" for split in ("train", "test")},
        ),
        convert=convert,
        # nanochat's, though some questions have three or five choices
        grader=multiple_choice.grader(baseline=0.25),
    )


EASY = _task("arc_easy", "ARC-Easy")
CHALLENGE = _task("arc_challenge", "ARC-Challenge")
