"""Questions with lettered choices: how they are put, and how an answer is judged.

The letter stands behind its choice, and without a space: small models then tie the two together,
and the letter is the very token that the answer is. The wording is nanochat's, so that scores can
be compared.
"""

from collections.abc import Sequence

from tasks.base import Conversation, TaskError
from tasks.kinds.sources import Grader


def make_conversation(
    question: str, letters: Sequence[str], choices: Sequence[str], answer: str, **more: object
) -> Conversation:
    """The conversation of one question, with "letters" and whatever else for the grader.

    Raises TaskError when letters and choices do not pair up, or the answer is none of them.
    """
    if len(letters) != len(choices):
        raise TaskError(f"{len(choices)} choices have {len(letters)} letters")
    if answer not in letters:
        raise TaskError(f"answer '{answer}' is none of the letters {', '.join(letters)}")
    lines = "".join(
        f"- {choice}={letter}\n" for letter, choice in zip(letters, choices, strict=True)
    )
    prompt = (
        f"Multiple Choice question: {question}\n{lines}\n"
        "Respond only with the letter of the correct answer."
    )
    return {
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer},
        ],
        "letters": list(letters),
        **more,
    }


def is_correct(conversation: Conversation, answer: str) -> bool:
    """Whether `answer` is the letter, and nothing else."""
    return answer.strip() == conversation["messages"][-1]["content"]


def grader(*, baseline: float) -> Grader:
    """Return the grader of a task with lettered choices; `baseline` is the accuracy of guessing.

    Raises TaskError unless that is between 0 and 1: ChatCORE would count guesses as knowledge.
    """
    if not 0.0 < baseline < 1.0:
        raise TaskError(f"lettered choices have a guessing baseline of {baseline}, not in (0, 1)")
    return Grader(is_correct=is_correct, baseline=baseline)
