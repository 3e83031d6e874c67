"""The command line as a process: a full disk, a reader that leaves, closed streams."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line():
    command = f"{sys.executable} -m flows.cli.app config --json > /dev/full"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: no space left on device",
        "hint: free some space, or choose another place: --home for work and history, else the "
        "path that the command is given",
    ]


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m flows.cli.app --help | true"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("words", "code"), [("config --json", 0), ("plan tinny", 1), ("plan", 2), ("ls", 0)]
)
def test_a_closed_stream_changes_no_exit_code_and_prints_no_traceback(
    words, code, closed, tmp_path
):
    command = f"{sys.executable} -X dev -m flows.cli.app {words} {closed}"
    done = subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, "NANOCHAT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
