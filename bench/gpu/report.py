"""How a step's program reports: lines for people, and one line of JSON for each result.

`main.py` stores every line of a step's stdout that is a JSON object, and prints the others in its
table. A result that only a GPU can give has {"needs": "a GPU"} on a CPU.
"""

import json
from typing import Any


def result(name: str, **values: Any) -> None:
    """Report a result: `values` are numbers, text, or trees of them."""
    print(json.dumps({"name": name, **values}), flush=True)


def needs_gpu(name: str) -> None:
    """Report that a result cannot be had on a CPU."""
    result(name, needs="a GPU")


def say(text: str) -> None:
    """Print a line of the table."""
    print(text, flush=True)
