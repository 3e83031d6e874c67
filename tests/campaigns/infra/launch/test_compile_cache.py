"""A kernel of torch.compile that a killed process left unfinished is compiled again, by torch."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from infra.launch.torchrun import JobFailed
from nanochat_core.job import Job
from tests.support.infra.launch.toy_jobs import ToyJobs, jobs

__all__ = ["jobs"]

pytestmark = pytest.mark.torch

ENTRY = """
import torch
from torch._inductor import cpu_vec_isa

cpu_vec_isa.valid_vec_isa_list = lambda: []  # torch finds them by six slow compilations

def run(job):
    return {"found": torch.compile(lambda x: x + 1)(torch.zeros(64)).sum().item()}
"""
# Of a process that is killed while its kernel is linked.
DYING_LINKER = """#!/bin/sh
case "$*" in *.main.so*) ;; *) exec {compiler} "$@" ;; esac
for word in "$@"; do
    [ "$before" = -o ] && printf '\\177ELF' > "$word"
    before=$word
done
kill -KILL $PPID
"""


@pytest.fixture
def job(jobs: ToyJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job that compiles a kernel, with caches of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torch's default is below it
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # slower than one kernel
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return jobs.make(ENTRY, compile=True)


def test_a_job_after_one_that_was_killed_while_it_compiled_compiles_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None
    path = os.environ["PATH"]
    (tmp_path / "g++").write_text(DYING_LINKER.format(compiler=compiler))
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        ToyJobs.run(job)
    monkeypatch.setenv("PATH", path)
    events: list[dict[str, Any]] = []

    result = ToyJobs.run(job, on_event=events.append)

    assert result.metrics == {"found": 64.0}
    (message,) = [event["text"] for event in events if event["kind"] == "message"]
    assert message.startswith("1 unfinished kernel of torch.compile removed")
