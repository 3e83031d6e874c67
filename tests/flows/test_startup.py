"""Asking costs nothing: help and plans answer at once, because what is slow is not loaded."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "prefect",
    "boto3",
    "duckdb",
    "fastapi",
    "uvicorn",
    "pyarrow",
    "tiktoken",
    "rich.progress",
    "flows.orchestration.pipeline",
    "flows.orchestration.stage_task",
)
SECONDS = 0.5
YARDSTICKS = 10  # on a machine that is slow just now; help takes 7 of them, torch alone 28
LIGHT = {
    "help": ["--help"],
    "plan help": ["plan", "--help"],
    "run help": ["run", "--help"],
    "profiles": ["profiles"],
    "plan": ["plan", "tiny"],
    "plan as json": ["plan", "tiny", "--json"],
    "status": ["status"],
}


def arguments(words: list[str], home: Path) -> list[str]:
    takes_home = words[0] in ("plan", "status") and "--help" not in words
    return [*words, "--home", str(home)] if takes_home else words


@pytest.mark.parametrize("name", LIGHT)
def test_asking_loads_nothing_heavy(name: str, tmp_path: Path) -> None:
    script = (
        "import sys; from flows.cli.app import main; main(sys.argv[1:]);"
        f"sys.stderr.write(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments(LIGHT[name], tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["help", "plan"])
def test_asking_is_answered_at_once(name: str, tmp_path: Path) -> None:
    asking = ["-m", "flows.cli.app", *arguments(LIGHT[name], tmp_path)]
    seconds, yardstick = (_seconds_of(words) for words in (asking, ["-c", "import asyncio"]))
    assert seconds < max(SECONDS, YARDSTICKS * yardstick)


def _seconds_of(words: list[str]) -> float:
    """CPU time of the quickest of some runs of Python."""
    found: list[float] = []
    for _ in range(5):
        start = _children_seconds()
        subprocess.run([sys.executable, *words], capture_output=True, timeout=60)
        found.append(_children_seconds() - start)
    return min(found)


def _children_seconds() -> float:
    """CPU time of processes that ended: a machine's other work changes it little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
