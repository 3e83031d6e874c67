"""A launcher to be killed: `python -m tests.support.reliability.launch_job DIRECTORY RANKS`.

It imports little, so that it is quick to start.
"""

import sys
from pathlib import Path

from infra.launch.torchrun import run_job
from nanochat_core.job import Job

if __name__ == "__main__":
    job = Job.read(Path(sys.argv[1]) / "job.json")
    run_job(job, processes=int(sys.argv[2]), on_event=lambda event: None)
