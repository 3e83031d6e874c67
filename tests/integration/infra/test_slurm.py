"""The scripts for sbatch: what they ask of Slurm, what they start, how they end.

A `nanochat`, `srun`, `scontrol` and `scancel` of the test's own stand in for the real ones.
"""

import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.flows.waiting import wait_until
from tests.support.infra.deployed import INFRA, MIN_GRACE, mistake

SCRIPTS = {name: INFRA / "slurm" / f"{name}.sbatch" for name in ("run", "stage")}
BOTH = pytest.mark.parametrize("name", sorted(SCRIPTS))
SECONDS = 60


def text(name: str) -> str:
    return SCRIPTS[name].read_text()


@BOTH
def test_the_script_gets_a_signal_before_its_time_is_over_and_is_requeued(name: str) -> None:
    options = dict(re.findall(r"(?m)^#SBATCH --([^\s=]+)=?(\S*)$", text(name)))
    seconds = re.fullmatch(r"B:TERM@(\d+)", options["signal"])
    assert seconds
    assert int(seconds[1]) >= MIN_GRACE
    assert "requeue" in options
    assert options["open-mode"] == "append"  # else a restart erases what was said before
    assert options["ntasks-per-node"] == "1"


@BOTH
def test_the_commands_in_its_head_are_ones_that_there_are(name: str) -> None:
    words = shlex.split(re.search(rf"(?m)^#   sbatch .*{name}\.sbatch (.+)$", text(name))[1])
    assert mistake(["nanochat", name, *words]) is None


@dataclass(frozen=True)
class End:
    """What a script ended with, and what it asked of Slurm."""

    code: int
    out: str
    err: str
    requests: list[str]


class SlurmJob:
    """A job as Slurm starts it, on a node whose tools are stand-ins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "bin").mkdir()

    def run(self, name: str, run: str, *, stop: bool = False, **options: Any) -> End:
        """Run a script to its end; `stop` it with SIGTERM once `run` has touched `up`."""
        script = self.start(name, run, **options)
        if stop:
            wait_until((self.directory / "up").exists)
            script.send_signal(signal.SIGTERM)
        out, err = script.communicate(timeout=SECONDS)
        requests = self.directory / "requeued"
        asked = requests.read_text().splitlines() if requests.exists() else []
        return End(script.returncode, out, err, asked)

    def start(
        self,
        name: str,
        run: str,
        *,
        state: str = "RUNNING",
        srun: str = 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        words: tuple[str, ...] | None = None,
        **environment: str,
    ) -> "subprocess.Popen[str]":
        """Start a script on a node whose `nanochat` does as `run` says."""
        tools = self.directory / "bin"
        for tool, body in {
            "nanochat": f'[[ $1 == down ]] && exit; echo started "$@"; echo $$ > pid; {run}',
            "srun": srun,
            "scancel": "kill -TERM $(cat pid)",
            "scontrol": '[[ $1 == requeue ]] && echo "$@" >> requeued; '
            '[[ $1 == show && $2 == hostnames ]] && { printf "%s\\n" n1 n2; exit; }; '
            f'echo "JobId=7 JobState={state} Reason=None"',
        }.items():
            (tools / tool).write_text(f"#!/bin/bash\n{body}\n")
            (tools / tool).chmod(0o755)
        usual = {"run": ["tiny"], "stage": ["tiny", "pretrain"]}[name]
        return subprocess.Popen(
            ["bash", SCRIPTS[name], *(words or usual)],
            cwd=self.directory,
            env={
                "PATH": f"{tools}:{os.environ['PATH']}",
                "HOME": str(self.directory),
                "NANOCHAT_STORE": "s3://bucket/prefix",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "n1",
                "SLURM_CPUS_ON_NODE": "96",  # of this node alone
                "SLURM_JOB_CPUS_PER_NODE": "96(x3),64,128(x2)",
                "SLURM_NNODES": "2",
                "SLURM_NODEID": "1",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def job(tmp_path: Path) -> SlurmJob:
    return SlurmJob(tmp_path)


@BOTH
def test_its_command_is_one_that_there_is(name: str, job: SlurmJob) -> None:
    started = re.search(r"(?m)^started (.+)$", job.run(name, "exit 0").out)
    assert started
    assert mistake(["nanochat", *shlex.split(started[1])]) is None


@BOTH
def test_without_a_store_that_outlives_the_node_nothing_starts(name: str, job: SlurmJob) -> None:
    end = job.run(name, "exit 0", NANOCHAT_STORE="")
    assert end.code == 1
    assert end.err.splitlines()[0] == "error: NANOCHAT_STORE is not set"
    assert "started" not in end.out


@pytest.mark.parametrize("option", ["--force", "--force=sft", "--from-stage", "--from-stage=sft"])
def test_a_run_that_would_rebuild_after_every_requeue_is_refused(
    option: str, job: SlurmJob
) -> None:
    end = job.run("run", "exit 0", words=("tiny", option))
    error, hint = end.err.splitlines()
    word = option.partition("=")[0]
    assert error == f"error: {word} would rebuild from step 0 after every requeue"
    command = ["nanochat", *re.findall(r"(stage)\.sbatch (PROFILE) (STAGE) (--force)$", hint)[0]]
    filled = {"STAGE": "sft", "PROFILE": "d32"}
    assert mistake([filled.get(word, word) for word in command]) is None
    assert (end.code, end.out) == (1, "")


AGAIN = ["requeue 7"]


@pytest.mark.parametrize(
    ("name", "code", "state", "requests"),
    [
        *((name, 130, "RUNNING", AGAIN) for name in SCRIPTS),  # it saved
        *((name, 130, "CANCELLED", []) for name in SCRIPTS),
        *((name, 1, "RUNNING", []) for name in SCRIPTS),  # it failed meanwhile
        ("stage", 143, "RUNNING", AGAIN),  # stopped before it could save
    ],
)
def test_a_job_that_is_stopped_comes_back_if_it_saved_and_was_not_cancelled(
    name: str, code: int, state: str, requests: list[str], job: SlurmJob
) -> None:
    slow = f"trap 'sleep 1; echo saved; exit {code}' TERM; touch up; while :; do sleep 0.05; done"
    end = job.run(name, slow, stop=True, state=state)
    assert "saved" in end.out  # the script waited for it
    assert (end.code, end.requests) == (code, requests)


@pytest.mark.parametrize(
    ("name", "code", "restarts", "requests"),
    [
        *((name, code, "0", []) for name in SCRIPTS for code in (0, 1)),
        ("run", 130, "0", []),  # cancelled on Prefect's pages
        ("stage", 75, "0", AGAIN),
        ("stage", 75, "19", AGAIN),
        ("stage", 75, "20", []),
        ("stage", 137, "0", AGAIN),  # a process that the kernel killed
        ("stage", 137, "20", []),
        ("stage", 143, "0", []),
    ],
)
def test_a_job_that_ends_by_itself_ends_as_its_command_and_comes_back_if_it_was_lost(
    name: str, code: int, restarts: str, requests: list[str], job: SlurmJob
) -> None:
    end = job.run(name, f"exit {code}", SLURM_RESTART_COUNT=restarts)
    assert (end.code, end.requests) == (code, requests)


@pytest.mark.parametrize("second", [75, 0])
def test_a_mistake_on_one_node_decides_over_what_it_did_to_the_others(
    second: int, job: SlurmJob
) -> None:
    both = 'while [[ $1 == --* ]]; do shift; done; "$@"; a=$?; SLURM_NODEID=0 "$@"; b=$?'
    run = f"[[ $PET_NODE_RANK == 0 ]] && exit {second}; exit 1"
    end = job.run("stage", run, srun=f"{both}; exit $((a > b ? a : b))")
    assert (end.code, end.requests) == (1, [])


REQUEST = '{"stage": "pretrain", "place": ["a=\\"b c\\"", "$HOME"]}'
NODE = "echo node $PET_NODE_RANK of $PET_NNODES at $PET_MASTER_ADDR"


@pytest.mark.parametrize(
    ("run", "options", "line"),
    [
        ("", {}, "started stage tiny pretrain --run slurm-7 --place grace_seconds=90\n"),
        ("", {"srun": 'echo asked "$@"'}, "asked --cpus-per-task=64 "),  # those of the smallest
        (NODE, {}, "node 1 of 2 at n1\n"),
        (NODE, {"PET_MASTER_ADDR": "ib1"}, "node 1 of 2 at ib1\n"),
        ("", {"words": ("stage", REQUEST)}, f"started stage {REQUEST}\n"),
    ],
)
def test_what_a_stage_is_started_with_on_each_node(
    run: str, options: dict[str, Any], line: str, job: SlurmJob
) -> None:
    assert line in job.run("stage", run, **options).out
