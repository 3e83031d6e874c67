"""What judging a program of a model costs: `python -m bench.sandbox`.

One problem shaped like HumanEval's (typing imported, seven assertions) is judged over and over, the
ways of making a sandbox in turn, and beside them an interpreter that does nothing. Then 164 of them
are judged as `chat_eval` does, as many at a time as there are CPUs. With NANOCHAT_DIR, nanochat's
`execute_code` judges the same ones, without a sandbox. JSON on the last line, in milliseconds.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.base import Conversation
from tasks.sandbox.backends import Backend, find_backends
from tasks.sandbox.humaneval_grader import MEMORY_MB, SECONDS, are_correct, check_of, program_of
from tasks.sandbox.process import run_in

NUM_PROBLEMS = 164
PROMPT = '''from typing import List


def below_zero_{i}(operations: List[int]) -> bool:
    """Whether a balance that starts at zero falls below it.
    >>> below_zero_{i}([1, 2, -4, 5])
    True
    """
'''
BODY = "    total = 0\n    for x in operations:\n        total += x\n        if total < 0:\n"
BODY += "            return True\n    return False\n"
TEST = """
METADATA = {'author': 'bench'}

def check(candidate):
    assert candidate([]) == False
    assert candidate([1, 2, -3, 1, 2, -3]) == False
    assert candidate([1, 2, -4, 5, 6]) == True
    assert candidate([1, -1, 2, -2, 5, -5, 4, -4]) == False
    assert candidate([1, -1, 2, -2, 5, -5, 4, -5]) == True
    assert candidate([1, -2, 2, -2, 5, -5, 4, -4]) == True
    assert candidate(list(range(100))) == False
"""


def problem(i: int) -> tuple[Conversation, str]:
    """A question and its right answer; each `i` is another."""
    prompt = PROMPT.format(i=i)
    user = {"role": "user", "content": prompt}
    asked = {"messages": [user], "entry_point": f"below_zero_{i}", "test": TEST}
    return asked, f"```python\n{prompt}{BODY}```"


def grade_in(backend: Backend) -> bool:
    """Whether the first problem's answer passes."""
    conversation, answer = problem(0)
    program, check = program_of(conversation, answer), check_of(conversation)
    return run_in(backend, program, check, seconds=SECONDS, memory_mb=MEMORY_MB).passed


def open_peer() -> Callable[[int], bool] | None:
    """nanochat's judging of the problem of a number; None without NANOCHAT_DIR."""
    folder = os.environ.get("NANOCHAT_DIR")
    if folder is None:
        return None
    spec = importlib.util.spec_from_file_location(
        "peer_execution", Path(folder) / "nanochat" / "execution.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def grade(i: int) -> bool:
        conversation, answer = problem(i)
        program = program_of(conversation, answer)
        entry_point = conversation["entry_point"]
        return module.execute_code(f"{program}\n{TEST}\ncheck({entry_point})").success

    return grade


def timed(run: Callable[[], object]) -> float:
    """How many milliseconds a call takes."""
    started = time.perf_counter()
    assert run()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="What judging a program of a model costs.")
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    found = [backend for backend in find_backends() if not isinstance(backend, str)]
    python = [sys.executable, "-I", "-S", "-c", "pass"]
    cases: dict[str, Callable[[], object]] = {
        "an interpreter that does nothing": lambda: subprocess.run(python, env={}, check=True),
    }
    for backend in found:
        cases[backend.kind] = lambda backend=backend: grade_in(backend)
    if peer := open_peer():
        cases["nanochat's execute_code"] = lambda: peer(0)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):  # in turn, so that what else the machine does meets all
        for name, run in cases.items():
            times[name].append(timed(run))
    reported = {n: {"best": min(t), "median": statistics.median(t)} for n, t in times.items()}
    for name, values in reported.items():
        print(f"{name:<36} best {values['best']:6.1f} ms   median {values['median']:6.1f} ms")
    problems = [problem(i) for i in range(NUM_PROBLEMS)]
    whole = {"ours": timed(lambda: all(are_correct(problems)))}
    if peer:
        whole["nanochat"] = timed(lambda: all(peer(i) for i in range(NUM_PROBLEMS)))
    for name, milliseconds in whole.items():
        print(f"{NUM_PROBLEMS} problems, {name:<21} {milliseconds / 1e3:6.2f} s")
    print(json.dumps({"cpus": len(os.sched_getaffinity(0)), "one": reported, "all": whole}))


if __name__ == "__main__":
    main()
