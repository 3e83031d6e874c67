"""Jobs whose entry module a test writes, and their runs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.launch.torchrun import run_job
from nanochat_core.job import Job, Result
from tests.support.flows.waiting import wait_until
from tests.support.small_job import one_thread, small_job

ROOT = Path(__file__).parents[4]


def ignore(event: dict[str, Any]) -> None:
    """Do nothing with an event."""


class ToyJobs:
    """Jobs in one directory, all with the entry module that was written last."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, source: str | None = None, *, name: str = "job", **resources: Any) -> Job:
        """Return a job; `source` is that of its entry module, None: as it is."""
        if source is not None:
            (self.root / "toy_entry.py").write_text(source)
        return small_job(
            self.root / name,
            stage="toy",
            entry="toy_entry",
            config={"seed": 1},
            resources=one_thread(**{"save_every_seconds": 1.0, **resources}),
        )

    def body(self, body: str) -> Job:
        """Return a job whose entry's `run` has this body."""
        lines = "\n".join(line for line in body.splitlines() if line.strip())
        return self.make(f"def run(job):\n{lines}\n")

    @staticmethod
    def run(job: Job, processes: int = 1, **options: Any) -> Result:
        """Run a job to its end."""
        return run_job(job, processes=processes, **{"on_event": ignore, **options})

    @staticmethod
    def launch(job: Job, processes: int = 1) -> "subprocess.Popen[bytes]":
        """Start a launcher of the job that a test can kill."""
        job.directory.mkdir(exist_ok=True)
        job.write()
        launcher = "tests.support.reliability.launch_job"
        return subprocess.Popen(
            [sys.executable, "-m", launcher, str(job.directory), str(processes)],
            cwd=ROOT,
        )

    @staticmethod
    def wait_for_file(path: Path) -> str:
        """Return the text of a file once it has some."""
        return wait_until(lambda: path.read_text() if path.exists() else "", what=str(path))


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyJobs:
    """Jobs whose workers find the entry module, and our packages where this file is."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    return ToyJobs(tmp_path)
