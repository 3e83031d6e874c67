"""Ask a chat model the sixty questions of `tasks/generated/people.toml`, each in a fresh chat.

    python -m bench.people MODEL [--seeds 8] [--wrong] [--questions FILE]

MODEL is a name as `nanochat chat` takes it, FILE has other questions in the same form, such as
`bench/identity_questions.toml` for a model with that identity. Prints the share of answers that a
fair person accepts, by kind of question: at temperature 0, and at the temperature of the chat page
with each of seeds 0 to N - 1. `--wrong` prints the answers that are not accepted.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from nanochat_flows.client import Client, open_client
from tasks.generated.people import Question, questions, read_questions

GOAL = 0.9


def main() -> None:
    """Print a row for each run of the questions, and the mean of the sampled ones."""
    parser = argparse.ArgumentParser(description="Ask a chat model sixty questions of people.")
    parser.add_argument("model")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--questions", type=Path)
    options = parser.parse_args()
    client = open_client()
    asked = read_questions(options.questions) if options.questions else questions()
    kinds = Counter(question.kind for question in asked)
    print(f"{'':16}{'all':>7}" + "".join(f"{kind:>12}" for kind in kinds))
    shares = []
    for seed in (None, *range(options.seeds)):
        answers = ask(client, options.model, asked, seed)
        right = [q for q, answer in zip(asked, answers, strict=True) if q.is_right(answer)]
        share = len(right) / len(asked)
        found = Counter(question.kind for question in right)
        name = "temperature 0" if seed is None else f"seed {seed}"
        cells = (f"{found[kind]}/{number}" for kind, number in kinds.items())
        print(f"{name:16}{share:7.1%}" + "".join(f"{cell:>12}" for cell in cells))
        if options.wrong:
            print_wrong(asked, answers)
        if seed is not None:
            shares.append(share)
    if shares:
        mean = sum(shares) / len(shares)
        print(f"mean of {len(shares)} seeds {mean:.1%}, lowest {min(shares):.1%}; goal {GOAL:.0%}")


def ask(client: Client, model: str, asked: Sequence[Question], seed: int | None) -> list[str]:
    """Return the model's answers, greedy without a seed, else as the chat page samples."""
    chat = (
        client.chat(model, seed=0, temperature=0.0)
        if seed is None
        else client.chat(model, seed=seed)
    )
    answers = []
    for question in asked:
        chat.clear()
        answers.append(chat.ask(question.text))
    return answers


def print_wrong(asked: Sequence[Question], answers: Sequence[str]) -> None:
    """Print each question whose answer is not accepted."""
    for question, answer in zip(asked, answers, strict=True):
        if not question.is_right(answer):
            print(f"    {question.text}  ->  {answer!r}")


if __name__ == "__main__":
    main()
