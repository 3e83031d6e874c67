"""`pytest --workers N`: reports arrive as from one process, and a lost worker costs one test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST = """
import os, signal, time, pytest

@pytest.fixture(scope="module")
def closed():
    yield
    print("closed the module")

def test_prints(closed):
    print("printed by the first file")

def test_ends_its_worker(closed):
    os.kill(os.getpid(), signal.SIGKILL)

def test_fails_in_a_new_worker(closed, tmp_path):
    print("printed before it failed, in", tmp_path)
    assert 1 == 2

@pytest.mark.timeout(1)
def test_hangs(closed):
    time.sleep(600)

def test_is_skipped(closed):
    pytest.skip("needs a tool")
"""
SECOND = """
import os
import test_first

def test_has_the_same_interpreter_state(tmp_path):
    print("printed by the second file")
    assert os.getppid() == int(os.environ["FIRST_PROCESS"])
"""
CONFTEST = """
import os
os.environ["FIRST_PROCESS"] = str(os.getpid())
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory with two files of tests, of which three pass or are skipped."""
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    return tmp_path


def run(directory: Path, *options: str) -> str:
    """Return what pytest prints."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-p", "no:schemathesis", "--workers", "2", f"--basetemp={directory}/base"]
    command += [f"--rootdir={directory}", "-c", str(directory / "pytest.ini"), *options]
    command += [str(directory)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_a_lost_worker_fails_its_test_and_another_runs_the_rest_of_the_file(
    directory: Path,
) -> None:
    printed = run(directory)
    assert "3 failed, 2 passed, 1 skipped" in printed
    assert "Timeout (>1.0s) from pytest-timeout" in printed
    assert re.search(r"worker w\d ended in this test: killed by SIGKILL", printed)
    assert "assert 1 == 2" in printed
    assert f"printed before it failed, in {directory}/base/w" in printed
    assert "printed by the second file" not in printed
    assert "1 skipped: needs a tool" in printed


def test_a_run_that_stops_at_the_first_failure_ends_its_workers(directory: Path) -> None:
    printed = run(directory, "-x", "-k", "fails or skipped")
    assert "1 failed" in printed
    assert "skipped" not in printed.splitlines()[-1]
    assert "stopping after 1 failures" in printed
