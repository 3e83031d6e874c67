"""Gangs of Slurm: a batch job each, from a machine that has sbatch, such as a login node.

The job's script is infra/slurm/stage.sbatch. sbatch's own variables (SBATCH_PARTITION,
SBATCH_ACCOUNT, SBATCH_TIMELIMIT and so on) replace its options.
"""

import os
import re
import subprocess
from pathlib import Path

from infra.gangs.base import SECONDS, GangError, GangSpec, GangState, Phase, SchedulerUnavailable

SCRIPT = Path(__file__).parents[1] / "slurm" / "stage.sbatch"
_UNAVAILABLE = re.compile(
    r"unable to contact|timed out|connection refused|try again|unavailable", re.I
)
# Jobs inherit the environment, but they are no flow run.
_OF_THIS_PROCESS = ("PREFECT__FLOW_RUN_ID",)
# If this process is in a job itself, Slurm's variables have that job's limits, which srun would set
# for the processes of the other one. These three say where the cluster is.
_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
# Of Slurm's states; in any other, such as COMPLETING or STAGE_OUT, the job has not ended.
_QUEUED = "PENDING CONFIGURING REQUEUED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT"
_FAILED = "FAILED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED REVOKED"
_PHASES: dict[str, Phase] = {
    **dict.fromkeys(_QUEUED.split(), "queued"),
    **dict.fromkeys(_FAILED.split(), "failed"),
    "COMPLETED": "finished",
    "CANCELLED": "cancelled",
}


class Slurm:
    """The Slurm cluster of this machine's configuration."""

    def __init__(self, logs: Path) -> None:
        """Have jobs write to the directory `logs`, which the first node of each has to reach."""
        self._logs = logs

    def find(self, name: str) -> str | None:
        """Return the id of the user's job of this name that waits or runs, or None."""
        # CONFIGURING and REQUEUED are flags: such a job does not match RUNNING or PENDING. Without
        # COMPLETING, the flag also of a job that was cancelled and still saves.
        states = "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING,REQUEUED"
        found = _run("squeue", "--me", "--noheader", f"--name={name}", states, "--format=%i")
        return next(iter(found.split()), None)

    def submit(self, spec: GangSpec) -> str:
        """Submit a job and return its id."""
        self._logs.mkdir(parents=True, exist_ok=True)
        options = [
            f"--job-name={spec.name}",
            f"--nodes={spec.nodes}",
            f"--output={self._logs}/%j.log",
        ]
        if spec.gpus is not None:
            options.append(f"--gpus-per-node={spec.gpus}")
        # singleton: a second job of this name waits until the first has ended.
        words = ["sbatch", "--parsable", "--dependency=singleton", *options, str(SCRIPT)]
        made = _run(*words, *spec.words, environment={"NANOCHAT_STORE": spec.store})
        return made.strip().partition(";")[0]  # ID;CLUSTER

    def describe(self, gang: str) -> str:
        """Return the job's id, and the command that shows it."""
        return f"Slurm job {gang}: scontrol show job {gang}; its log is {self._logs}/{gang}.log"

    def state(self, gang: str) -> GangState:
        """Return the job's state as the controller knows it."""
        try:
            record = _run("scontrol", "--oneliner", "show", "job", gang)
        except SchedulerUnavailable:
            raise
        except GangError:  # it forgets a job some minutes after its end
            return GangState(phase="failed", text="Slurm does not know it any more")
        fields = dict(re.findall(r"(\w+)=(\S*)", record))
        state, reason = fields["JobState"], fields["Reason"]
        phase = _PHASES.get(state, "running")
        code = re.match(r"(\d+):0$", fields["ExitCode"]) if phase == "failed" else None
        text = state if reason == "None" else f"{state} ({reason})"
        return GangState(phase=phase, text=text, exit_code=int(code[1]) if code else None)

    def cancel(self, name: str) -> None:
        """Cancel the user's jobs of this name: SIGTERM now, SIGKILL after Slurm's KillWait."""
        _run("scancel", "--quiet", "--me", f"--name={name}")

    def logs(self, gang: str, after: str) -> tuple[list[str], str]:
        """Return the new whole lines of the job's log; `after` is the byte where they begin."""
        start = int(after or 0)
        try:
            with (self._logs / f"{gang}.log").open("rb") as log:
                log.seek(start)
                data = log.read()
        except OSError:  # not started, or not yet seen through the shared file system
            return [], after
        *lines, partial = data.split(b"\n")
        end = start + len(data) - len(partial)
        return [line.decode(errors="replace") for line in lines], str(end)


def _is_inherited(name: str) -> bool:
    """Return whether jobs get this variable of ours."""
    is_of_our_job = "SLURM_JOB_ID" in os.environ and name.startswith("SLURM_")
    return name in _OF_THE_CLUSTER or not (is_of_our_job or name in _OF_THIS_PROCESS)


def _run(*words: str, environment: dict[str, str] | None = None) -> str:
    """Return the output of a command of Slurm."""
    inherited = {name: value for name, value in os.environ.items() if _is_inherited(name)}
    try:
        done = subprocess.run(
            words,
            env={**inherited, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SchedulerUnavailable(f"{words[0]} did not end within {SECONDS:.0f} s") from None
    except FileNotFoundError:
        raise GangError(
            f"there is no {words[0]} here",
            hint="start the pool's worker on a machine that has Slurm's commands",
        ) from None
    except OSError as error:  # no memory for a process, say
        raise SchedulerUnavailable(f"{words[0]} cannot be started: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        kind = SchedulerUnavailable if _UNAVAILABLE.search(done.stderr) else GangError
        raise kind(f"{words[0]}: {lines[-1]}")
    return done.stdout
