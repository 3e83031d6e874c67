"""Gangs of Slurm, with stand-ins for its commands; the real ones are run by a campaign."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.gangs.base import GangError, GangSpec, SchedulerUnavailable
from infra.gangs.slurm import SCRIPT, Slurm

Play = Callable[..., Slurm]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Give a Slurm whose commands are these shell scripts."""

    def make(**bodies: str) -> Slurm:
        tools = tmp_path / "bin"
        tools.mkdir()
        for name, body in bodies.items():
            (tools / name).write_text(f"#!/bin/bash\n{body}\n")
            (tools / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        return Slurm(tmp_path / "logs")

    return make


def test_a_job_has_the_name_nodes_and_gpus_of_the_gang_and_runs_alone(
    play: Play, tmp_path: Path
) -> None:
    slurm = play(
        sbatch=f'printf "%s\\n" "$@" "$NANOCHAT_STORE" > {tmp_path}/words; echo "12;cluster"',
        squeue=f'printf "%s\\n" "$@" > {tmp_path}/asked; echo 12',
    )
    spec = GangSpec(name="sft-1a2b", nodes=4, gpus=2, words=("stage", '{"a": 1}'), store="s3://b/p")
    assert slurm.submit(spec) == "12"
    words = (tmp_path / "words").read_text().splitlines()
    options, rest = words[: words.index(str(SCRIPT))], words[words.index(str(SCRIPT)) + 1 :]
    assert {"--job-name=sft-1a2b", "--nodes=4", "--gpus-per-node=2"} < set(options)
    assert "--dependency=singleton" in options
    assert rest == ["stage", '{"a": 1}', "s3://b/p"]
    assert slurm.find("sft-1a2b") == "12"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {"--name=sft-1a2b", "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING,REQUEUED"} < set(
        asked
    )


def test_a_cancel_ends_all_jobs_of_the_name(play: Play, tmp_path: Path) -> None:
    """A submission that got no answer may have been carried out, and repeated."""
    play(scancel=f'printf "%s\\n" "$@" > {tmp_path}/words').cancel("sft-1a2b")
    assert (tmp_path / "words").read_text().split() == ["--quiet", "--me", "--name=sft-1a2b"]


@pytest.mark.parametrize("is_in_job", [False, True])
def test_a_job_is_no_flow_run_and_has_no_limit_of_the_job_in_which_it_is_requested(
    is_in_job: bool, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "PREFECT__FLOW_RUN_ID": "1",
        "SBATCH_PARTITION": "h100",
        "SLURM_MEM_PER_NODE": "500",
        "SLURM_CONF": "/etc/slurm.conf",
        **({"SLURM_JOB_ID": "7"} if is_in_job else {}),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    slurm = play(sbatch=f"env > {tmp_path}/environment; echo 12")
    slurm.submit(GangSpec(name="sft-1a2b", nodes=1, gpus=None, words=("stage",), store="s3://b/p"))
    lines = (tmp_path / "environment").read_text().splitlines()
    limit = set() if is_in_job else {"SLURM_MEM_PER_NODE"}  # then a person has set it
    assert {line.partition("=")[0] for line in lines} & given.keys() == limit | {
        "SBATCH_PARTITION",
        "SLURM_CONF",
    }


@pytest.mark.parametrize(
    ("record", "phase", "text", "code"),
    [
        ("JobState=PENDING Reason=Resources ExitCode=0:0", "queued", "PENDING (Resources)", None),
        ("JobState=RUNNING Reason=None ExitCode=0:0", "running", "RUNNING", None),
        ("JobState=COMPLETING Reason=None ExitCode=0:0", "running", "COMPLETING", None),
        ("JobState=COMPLETED Reason=None ExitCode=0:0", "finished", "COMPLETED", None),
        ("JobState=CANCELLED Reason=None ExitCode=0:15", "cancelled", "CANCELLED", None),
        ("JobState=FAILED Reason=NonZeroExitCode ExitCode=75:0", "failed", None, 75),
        ("JobState=NODE_FAIL Reason=None ExitCode=0:1", "failed", "NODE_FAIL", None),
        ("JobState=OUT_OF_MEMORY Reason=OutOfMemory ExitCode=0:125", "failed", None, None),
        ("JobState=OF_A_LATER_SLURM Reason=None ExitCode=0:0", "running", None, None),
    ],
)
def test_the_states_of_a_job(
    play: Play, record: str, phase: str, text: str | None, code: int | None
) -> None:
    state = play(scontrol=f'echo "JobId=12 JobName=x {record} Partition=all"').state("12")
    assert (state.phase, state.exit_code) == (phase, code)
    assert text in (state.text, None)


def test_a_job_that_the_controller_has_forgotten_is_lost(play: Play) -> None:
    slurm = play(scontrol="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    state = slurm.state("12")
    assert (state.phase, state.exit_code) == ("failed", None)
    assert "does not know" in state.text


def test_a_controller_that_does_not_answer_is_asked_again_and_one_that_refuses_is_not(
    play: Play,
) -> None:
    away = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
    slurm = play(scontrol=away, squeue="echo 'squeue: error: Invalid user: me' >&2; exit 1")
    with pytest.raises(SchedulerUnavailable, match="Unable to contact"):
        slurm.state("12")
    with pytest.raises(GangError, match="Invalid user") as caught:
        slurm.find("x")
    assert not isinstance(caught.value, SchedulerUnavailable)


def test_a_machine_without_slurm_says_so(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = play()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(GangError, match="there is no squeue here") as caught:
        slurm.find("x")
    assert "Slurm's commands" in (caught.value.hint or "")


def test_a_command_that_cannot_be_started_is_tried_again(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = play(squeue="")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin" / "squeue").write_bytes(b"\x7fELF")
    with pytest.raises(SchedulerUnavailable, match="squeue cannot be started"):
        slurm.find("x")


def test_lines_come_once_and_whole(play: Play, tmp_path: Path) -> None:
    slurm = play()
    assert slurm.logs("12", "") == ([], "")
    log = tmp_path / "logs" / "12.log"
    log.parent.mkdir()
    log.write_text("one\ntwo\nthr")
    lines, after = slurm.logs("12", "")
    assert lines == ["one", "two"]
    with log.open("a") as more:
        more.write("ee\nfo\rur\n")
    lines, after = slurm.logs("12", after)
    assert lines == ["three", "fo\rur"]
    assert slurm.logs("12", after) == ([], after)
