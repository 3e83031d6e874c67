"""The servers that the workers of a test run share: one of a kind, and none after the run."""

import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]
# A worker dies with one of these; the two that run the others go on with the same server.
TESTS = """
import os
from pathlib import Path


def test_it_answers(s3_server):
    seen = f"{s3_server.endpoint} {s3_server.process.pid}"
    Path(__file__).with_suffix(".seen").write_text(seen)
    assert s3_server.client("s3").list_buckets()["Buckets"][0]["Name"] == "nanochat"
    if "dies" in __file__:
        os._exit(1)
"""


def test_workers_share_one_server_which_outlives_a_worker_and_not_the_run(tmp_path: Path) -> None:
    for name in ("dies", "lives", "lives_too"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-n", "2", "--basetemp")
    command = [sys.executable, "-m", "pytest", "-q", *options, str(tmp_path / "run"), str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)

    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "crashed while running" in done.stdout
    assert "test_dies.py::test_it_answers'" in done.stdout
    seen = [path.read_text() for path in tmp_path.glob("*.seen")]
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert not psutil.pid_exists(int(seen[0].split()[1]))
