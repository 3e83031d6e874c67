"""How a step's program reports: lines for people, and one line of JSON for each result.

The scheduler stores every line of a step's stdout that is a JSON object, and prints the others in
its table. A result that only a GPU can give has {"needs": "a GPU"} on a CPU.
"""

import json
import os
import sys
from typing import Any

TURN = "BENCH_GPU_TURN"  # set where a scheduler gives the turn


def result(name: str, **values: Any) -> None:
    """Report a result: `values` are numbers, text, or trees of them."""
    print(json.dumps({"name": name, **values}), flush=True)


def needs_gpu(name: str) -> None:
    """Report that a result cannot be had on a CPU."""
    result(name, needs="a GPU")


def say(text: str) -> None:
    """Print a line of the table."""
    print(text, flush=True)


def wait_turn() -> None:
    """Report that all is compiled, and wait until the GPU is this program's alone.

    Returns at once where no scheduler started this. Raises SystemExit if the scheduler is gone.
    """
    if TURN in os.environ:
        print(json.dumps({"ready": True}), flush=True)
        if not sys.stdin.readline():
            sys.exit("the scheduler has ended")
