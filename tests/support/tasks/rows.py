"""Rows as the datasets on the Hub have them, made up."""

import random
from collections.abc import Callable, Mapping
from typing import Any

MakeRow = Callable[[random.Random], dict[str, Any]]

PIECES = (
    *("water", "Why?", "3 < 4", "caf\u00e9", "\u4e2d\u6587", "a=b", "- x=A\n", '"', "\n\n"),
    *("<<", ">>"),
)


def text(rng: random.Random) -> str:
    """A few words, some of them awkward."""
    return " ".join(rng.choices(PIECES, k=rng.randint(1, 6)))


def mmlu(rng: random.Random) -> dict[str, Any]:
    return {
        "question": text(rng),
        "subject": rng.choice(["", "astronomy"]),
        "choices": [text(rng) for _ in range(4)],
        "answer": rng.randrange(4),
    }


def arc(rng: random.Random) -> dict[str, Any]:
    letters = rng.choice(["ABCD", "1234", "ABC", "ABCDE"])
    choices = {"text": [text(rng) for _ in letters], "label": list(letters)}
    return {
        "id": f"Mercury_{rng.randrange(10**6)}",
        "question": text(rng),
        "choices": choices,
        "answerKey": rng.choice(letters),
    }


def gsm8k(rng: random.Random) -> dict[str, Any]:
    pieces = [text(rng).replace("<<", "").replace(">>", "")]
    for _ in range(rng.randrange(4)):
        a, b = rng.randint(-50, 5000), rng.randint(1, 99)
        pieces.append(rng.choice([f"<<{a}+{b}={a + b}>>", f"<<{a}={b}={a}>>", "<<12>>"]))
        pieces.append(rng.choice(["", f"{a + b}\n", "."]))
    number = rng.choice(["72", "-3", "1,234,567", "0.5", "12.", "7,000"])
    return {"question": text(rng), "answer": "".join(pieces) + f"\n#### {number}"}


def smoltalk(rng: random.Random) -> dict[str, Any]:
    system = [{"role": "system", "content": text(rng)}] * rng.randrange(2)
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": text(rng)}
        for i in range(rng.randint(2, 7))
    ]
    return {"messages": system + turns, "source": "made-up"}


def humaneval(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(("double", "twice"))
    imports = rng.choice(("", "import math\n\n", "# why\nfrom typing import List\n\n\n"))
    return {
        "task_id": f"HumanEval/{rng.randrange(200)}",
        "prompt": f'{imports}def {name}(x):\n    """{text(rng)}"""\n',
        "entry_point": name,
        "canonical_solution": "    return 2 * x\n",
        "test": f"def check(candidate):\n    assert candidate({rng.randrange(9)}) >= 0\n",
    }


ROWS: Mapping[str, MakeRow] = {
    "mmlu": mmlu,
    "arc_easy": arc,
    "arc_challenge": arc,
    "gsm8k": gsm8k,
    "smoltalk": smoltalk,
    "humaneval": humaneval,  # has no split to train on
}
TRAINED_ON = sorted(ROWS.keys() - {"humaneval"})


def rows_of(name: str, count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of the dataset of task `name`."""
    rng = random.Random(seed)
    return [ROWS[name](rng) for _ in range(count)]
