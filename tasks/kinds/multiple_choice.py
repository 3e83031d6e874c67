"""Format questions with lettered choices, and grade their answers.

The wording is nanochat's, so that scores are comparable.
"""

from collections.abc import Sequence

from tasks.base import Conversation, TaskError, one_turn
from tasks.kinds.sources import Grader


def make_conversation(
    question: str, letters: Sequence[str], choices: Sequence[str], answer: str, **more: object
) -> Conversation:
    """Return the conversation of one question, with "letters" and `more` keys for the grader.

    Raises TaskError if the numbers of letters and choices differ, or the answer is not a letter.
    """
    if len(letters) != len(choices):
        raise TaskError(f"{len(choices)} choices have {len(letters)} letters")
    if answer not in letters:
        raise TaskError(f"answer '{answer}' is not one of the letters {', '.join(letters)}")
    # The letter comes after its choice, which small models bind better, and without a space, so
    # that it is the same token as the answer.
    lines = "".join(
        f"- {choice}={letter}\n" for letter, choice in zip(letters, choices, strict=True)
    )
    prompt = (
        f"Multiple Choice question: {question}\n{lines}\n"
        "Respond only with the letter of the correct answer."
    )
    return one_turn(prompt, answer, letters=list(letters), **more)


def is_correct(conversation: Conversation, answer: str) -> bool:
    """Return whether `answer` is exactly the letter, except for surrounding whitespace."""
    return answer.strip() == conversation["messages"][-1]["content"]


def grader(*, baseline: float) -> Grader:
    """Return the grader of a task with lettered choices; `baseline` is the accuracy of guessing.

    Raises TaskError unless that is between 0 and 1.
    """
    # With a baseline of 0 ChatCORE would count guesses as knowledge.
    if not 0.0 < baseline < 1.0:
        raise TaskError(f"lettered choices have a guessing baseline of {baseline}, not in (0, 1)")
    return Grader(is_correct=is_correct, baseline=baseline)
