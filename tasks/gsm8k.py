"""GSM8K: grade-school word problems whose solutions call a calculator (Cobbe et al. 2021,
arXiv:2110.14168).

A solution has calls written `<<48/2=24>>` and ends in `#### 72`.
"""

import re

from tasks.base import Conversation, Part, is_first_number, one_turn
from tasks.kinds.sources import Grader, HubDataset, HubTask, Row, text

_CALL = re.compile(r"<<([^>]+)>>")


def convert(row: Row) -> Conversation:
    """Convert a row (question, answer) to a conversation with calls as parts."""
    return one_turn(text(row, "question"), _parts(text(row, "answer")))


def _parts(solution: str) -> list[Part]:
    """Split a solution into text, call and result parts."""
    # A text between two calls may be empty, as in nanochat.
    parts: list[Part] = []
    end = 0
    for call in _CALL.finditer(solution):
        expression, equals, result = call[1].rpartition("=")
        parts.append({"type": "text", "text": solution[end : call.start()]})
        # The last "=" separates the result. Without one the whole text is the call.
        parts.append({"type": "python", "text": expression if equals else call[1]})
        parts.append({"type": "python_output", "text": result if equals else ""})
        end = call.end()
    parts.append({"type": "text", "text": solution[end:]})
    return parts


TASK = HubTask(
    name="gsm8k",
    dataset=HubDataset(
        repository="openai/gsm8k",
        revision="e53f048856ff4f594e959d75785d2c2d37b678ee",
        files={split: f"main/{split}-*.parquet" for split in ("train", "test")},
    ),
    convert=convert,
    grader=Grader(is_correct=is_first_number, baseline=0.0),
)
