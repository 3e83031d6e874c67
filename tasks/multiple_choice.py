"""Questions with lettered choices: how they are put, and how an answer is judged.

The letter stands behind its choice, and without a space: small models then tie the two together,
and the letter is the very token that the answer is. The wording is nanochat's, so that scores can
be compared.
"""

from collections.abc import Sequence

from tasks.base import Conversation, TaskError


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
