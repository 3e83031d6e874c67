"""The scripts for sbatch: what they ask of Slurm, what they start, how they end.

A `nanochat`, `srun`, `scontrol` and `scancel` of the test's own stand in for the real ones.
"""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.infra.deployed import INFRA, LEAST_GRACE, mistake

SCRIPTS = {name: INFRA / "slurm" / f"{name}.sbatch" for name in ("run", "stage")}
BOTH = pytest.mark.parametrize("name", sorted(SCRIPTS))
SECONDS = 60


def text(name: str) -> str:
    return SCRIPTS[name].read_text()


def asked(name: str) -> dict[str, str]:
    """What the script asks of sbatch."""
    lines = re.findall(r"(?m)^#SBATCH --(\S+)$", text(name))
    return {option: value for option, _, value in (line.partition("=") for line in lines)}


def started(name: str) -> list[str]:
    """The command of ours that the script starts, each variable as a number."""
    line = re.search(
        r"(?m)(?:exec )?(nanochat (?:run|stage) [^'&\n)]+)", text(name).split("set -")[1]
    )
    assert line
    words = shlex.split(line[1])
    filled = {"run": ["tiny"], "stage": ["pretrain", "d32"]}[name]
    place = words.index("$@")
    rest = (re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in words[place + 1 :])
    return [*words[:place], *filled, *(re.sub(r"^\$\w+$", "1", word) for word in rest)]


@BOTH
def test_the_shell_can_read_it(name: str) -> None:
    assert text(name).startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", SCRIPTS[name]], check=True)


@BOTH
def test_the_script_gets_a_signal_before_its_time_is_over_and_is_requeued(name: str) -> None:
    options = asked(name)
    seconds = re.fullmatch(r"B:TERM@(\d+)", options["signal"])
    assert seconds
    assert int(seconds[1]) >= LEAST_GRACE
    assert "requeue" in options
    assert options["open-mode"] == "append"  # else a restart erases what was said before
    assert options["ntasks-per-node"] == "1"


@BOTH
def test_its_command_is_one_that_there_is(name: str) -> None:
    assert mistake(started(name)) is None


@BOTH
def test_the_commands_in_its_head_are_ones_that_there_are(name: str) -> None:
    words = shlex.split(re.search(rf"(?m)^#   sbatch .*{name}\.sbatch (.+)$", text(name))[1])
    assert mistake(["nanochat", name, *words]) is None


@BOTH
def test_without_a_store_that_outlives_the_node_nothing_starts(name: str, tmp_path: Path) -> None:
    with job(name, tmp_path, "exit 0", NANOCHAT_STORE="") as script:
        out, err = script.communicate(timeout=SECONDS)
    assert script.returncode == 1
    assert err.splitlines()[0] == "error: NANOCHAT_STORE is not set"
    assert "started" not in out


@pytest.mark.parametrize("option", ["--force", "--force=sft", "--from-stage", "--from-stage=sft"])
def test_a_run_that_would_rebuild_after_every_requeue_is_refused(
    option: str, tmp_path: Path
) -> None:
    with job("run", tmp_path, "exit 0", words=("tiny", option)) as script:
        out, err = script.communicate(timeout=SECONDS)
    error, hint = err.splitlines()
    word = option.partition("=")[0]
    assert error == f"error: {word} would rebuild from step 0 after every requeue"
    command = ["nanochat", *re.findall(r"(stage)\.sbatch (PROFILE) (STAGE) (--force)$", hint)[0]]
    filled = {"STAGE": "sft", "PROFILE": "d32"}
    assert mistake([filled.get(word, word) for word in command]) is None
    assert (script.returncode, out) == (1, "")


@BOTH
def test_a_run_that_saved_when_asked_to_is_put_back_in_the_queue(name: str, tmp_path: Path) -> None:
    assert end_of(name, tmp_path, code=130, state="RUNNING") == (130, ["requeue 7"])


@BOTH
def test_a_job_that_was_cancelled_does_not_come_back(name: str, tmp_path: Path) -> None:
    assert end_of(name, tmp_path, code=130, state="CANCELLED") == (130, [])


@BOTH
def test_a_run_that_failed_while_it_was_stopped_does_not_come_back(
    name: str, tmp_path: Path
) -> None:
    assert end_of(name, tmp_path, code=1, state="RUNNING") == (1, [])


@BOTH
@pytest.mark.parametrize("code", [0, 1])
def test_a_run_that_ends_by_itself_ends_the_job_as_it_did(
    name: str, code: int, tmp_path: Path
) -> None:
    with job(name, tmp_path, f"exit {code}") as script:
        script.communicate(timeout=SECONDS)
    assert script.returncode == code
    assert not (tmp_path / "requeued").exists()


def test_a_run_that_was_cancelled_in_prefects_pages_does_not_come_back(tmp_path: Path) -> None:
    with job("run", tmp_path, "exit 130") as script:
        script.communicate(timeout=SECONDS)
    assert (script.returncode, requested(tmp_path)) == (130, [])


@pytest.mark.parametrize(
    ("code", "restarts", "requests"),
    [
        (75, "0", ["requeue 7"]),
        (75, "19", ["requeue 7"]),
        (75, "20", []),
        (137, "0", ["requeue 7"]),  # a process that the kernel killed
        (137, "20", []),
        (143, "0", []),
    ],
)
def test_a_stage_that_was_lost_comes_back_so_many_times(
    code: int, restarts: str, requests: list[str], tmp_path: Path
) -> None:
    with job("stage", tmp_path, f"exit {code}", SLURM_RESTART_COUNT=restarts) as script:
        script.communicate(timeout=SECONDS)
    assert script.returncode == code
    assert requested(tmp_path) == requests


def test_a_stage_that_was_stopped_before_it_could_save_comes_back(tmp_path: Path) -> None:
    assert end_of("stage", tmp_path, code=143, state="RUNNING") == (143, ["requeue 7"])


@pytest.mark.parametrize(("second", "end"), [(75, (1, [])), (0, (1, []))])
def test_a_mistake_on_one_node_decides_over_what_it_did_to_the_others(
    second: int, end: tuple[int, list[str]], tmp_path: Path
) -> None:
    both = 'while [[ $1 == --* ]]; do shift; done; "$@"; a=$?; SLURM_NODEID=0 "$@"; b=$?'
    run = f"[[ ${{@: -1}} == 0 ]] && exit {second}; exit 1"
    with job("stage", tmp_path, run, srun=f"{both}; exit $((a > b ? a : b))") as script:
        script.communicate(timeout=SECONDS)
    assert (script.returncode, requested(tmp_path)) == end


def test_the_run_of_a_stage_has_the_number_of_the_job(tmp_path: Path) -> None:
    with job("stage", tmp_path, "exit 0") as script:
        out, _ = script.communicate(timeout=SECONDS)
    assert "started stage tiny pretrain --run slurm-7 --place grace_seconds=90\n" in out


def test_each_node_is_asked_for_the_cpus_of_the_smallest(tmp_path: Path) -> None:
    with job("stage", tmp_path, "", srun='echo asked "$@"') as script:
        out, _ = script.communicate(timeout=SECONDS)
    assert "asked --cpus-per-task=64 " in out


@pytest.mark.parametrize(("given", "address"), [({}, "n1"), ({"PET_MASTER_ADDR": "ib1"}, "ib1")])
def test_nodes_are_numbered_in_torchruns_variables(
    given: dict[str, str], address: str, tmp_path: Path
) -> None:
    run = "echo node $PET_NODE_RANK of $PET_NNODES at $PET_MASTER_ADDR"
    with job("stage", tmp_path, run, **given) as script:
        out, _ = script.communicate(timeout=SECONDS)
    assert f"node 1 of 2 at {address}\n" in out


def test_a_request_is_handed_on_as_it_is(tmp_path: Path) -> None:
    request = '{"stage": "pretrain", "place": ["a=\\"b c\\"", "$HOME"]}'
    with job("stage", tmp_path, "exit 0", words=("stage", request)) as script:
        out, _ = script.communicate(timeout=SECONDS)
    assert f"started stage {request}\n" in out


def requested(tmp_path: Path) -> list[str]:
    """What Slurm was asked for."""
    requests = tmp_path / "requeued"
    return requests.read_text().splitlines() if requests.exists() else []


def end_of(name: str, tmp_path: Path, *, code: int, state: str) -> tuple[int, list[str]]:
    """Exit code and requests to Slurm, of a run that takes a second to save when asked to stop."""
    slow = f"trap 'sleep 1; echo saved; exit {code}' TERM; touch up; while :; do sleep 0.05; done"
    with job(name, tmp_path, slow, state=state) as script:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
        out, _ = script.communicate(timeout=SECONDS)
    assert "saved" in out  # the script waited for it
    return script.returncode, requested(tmp_path)


def job(
    name: str,
    tmp_path: Path,
    run: str,
    *,
    state: str = "RUNNING",
    srun: str = 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    words: tuple[str, ...] | None = None,
    **environment: str,
) -> subprocess.Popen[str]:
    """The script as Slurm starts it, on a node whose `nanochat` does as `run` says."""
    tools = tmp_path / "bin"
    tools.mkdir()
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
    return subprocess.Popen(
        ["bash", SCRIPTS[name], *(words or {"run": ["tiny"], "stage": ["tiny", "pretrain"]}[name])],
        cwd=tmp_path,
        env={
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
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
