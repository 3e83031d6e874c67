"""Starts one job's worker processes on this machine, watches them, and says how the job ended.

One process runs directly; several run under torchrun, also on several machines (meeting.py), each
of which starts and watches its own. The workers write files and never to a pipe
of ours, so they outlive us long enough to save. They are started by the thread that watches them:
the kernel's "parent died" signal, which keeps orphans from training on, follows that thread.
"""

import contextlib
import json
import os
import shlex
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from infra.launch.earlier import earlier_workers_ended
from infra.launch.rendezvous import Rendezvous
from infra.launch.watchdog import Hang, Watchdog, find_place, pulses_of
from nanochat_core.errors import StageError
from nanochat_core.job import Job, Result
from nanochat_core.runtime.heartbeat import forget_pulses
from nanochat_core.worker import LAUNCHER_VARIABLE, STEPS_VARIABLE

OnEvent: TypeAlias = Callable[[dict[str, Any]], None]

SECONDS_BETWEEN_LOOKS = 0.25
SECONDS_TO_STOP = 25.0  # a worker saves in under 20
SHUTDOWN_TIMEOUT = 22  # torchrun's own patience with its ranks: between the two
_TAIL_BYTES = 3000
_TAIL_LINES = 20


class StageInterrupted(StageError):
    """The job was asked to stop; what it saved is used when it is started again."""


class JobFailed(StageError):
    """The job ended without a result, by a mistake of ours or of the machine."""

    def __init__(
        self, message: str, *, hint: str | None, log_tail: str, cause: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.log_tail = log_tail  # the last lines the failing process wrote
        self.cause = cause  # the exception's type; None when it was killed or stood still


def run_job(
    job: Job,
    *,
    processes: int,
    on_event: OnEvent,
    stop: threading.Event | None = None,
    check: Callable[[], None] = lambda: None,
    root: Path | None = None,
    steps: int | None = None,
    meeting: Rendezvous | None = None,
) -> Result:
    """Run `job` in `processes` workers until it ends; each progress event is passed to `on_event`.

    What an unfinished attempt left in the job's directory stays: the job goes on from there.
    Setting `stop`, in `on_event` or from another thread, ends the job as SIGTERM would. Whatever is
    raised here while the workers run (Ctrl-C, a cancelled flow run, an error of `on_event` or of
    `check`, which is called all the while and at the end) stops them first. With `root` the workers
    run the code of the repository that lies there; with `steps` they are interrupted after so many,
    their state saved, unless they come to their end before. With a `meeting` they are this
    machine's part of a job of several machines, `processes` on each. Only node 0 is left a result;
    elsewhere an empty one says that the ranks here ended well, and a JobFailed that they did not,
    whatever the reason: node 0 knows it.

    Raises StageInterrupted when the job saved and stopped, JobFailed when it broke or stood still
    for the resources' `hang_seconds`, and StageError with the worker's own message and hint when
    the worker met a mistake that a person can mend.
    """
    assert processes >= 1, processes
    stop = stop or threading.Event()
    job.directory.mkdir(parents=True, exist_ok=True)
    path = job.write()

    def log(text: str) -> None:
        on_event({"kind": "message", "text": text})

    with earlier_workers_ended(job, log, stop) as ended:
        if not ended:
            raise StageInterrupted(f"{job.stage} was not started: the run is being stopped")
        for name in ("result.json", "error.json"):
            (job.directory / name).unlink(missing_ok=True)
        forget_pulses(pulses_of(job))
        events = _Tail.after_last_attempt(job.events)
    # On other machines node 0 watches: a rank that hangs there makes its own stand still. Theirs
    # are silent for a reason while rank 0 waits for its disk or for their files.
    watch = None if meeting is not None and meeting.node else Watchdog(job)
    first_rank = meeting.first_rank(processes) if meeting else 0

    def look() -> None:
        events.pass_to(on_event)
        check()
        if watch is not None and (hang := watch.find()):
            watch.dump_stacks()
            raise _hung(job, hang, is_alone=meeting is None)

    with (job.directory / "worker.log").open("wb") as worker_log:
        returncode = _supervise(
            _command(path, processes, meeting),
            _environment(job, processes, root=root, steps=steps)
            | (meeting.environment() if meeting else {}),
            worker_log,
            look,
            stop,
        )
    if first_rank and not returncode:
        return Result(status="finished", metrics={})
    return _classify(job, returncode, asked_to_stop=stop.is_set(), first_rank=first_rank)


def replay_line(job: Job) -> str:
    """The command that runs the job again by hand."""
    return f"python -m nanochat_core.worker {shlex.quote(str(job.directory / 'job.json'))}"


def _command(path: Path, processes: int, meeting: Rendezvous | None) -> list[str]:
    if processes == 1 and meeting is None:
        return [sys.executable, "-m", "nanochat_core.worker", str(path)]
    return [
        sys.executable,
        "-m",
        "infra.launch.agent",
        *(meeting.words() if meeting else ["--rdzv-backend=loopback"]),
        f"--nproc-per-node={processes}",
        "--redirects=3",
        f"--log-dir={path.parent / 'ranks'}",
        f"--shutdown-timeout={SHUTDOWN_TIMEOUT}",
        "-m",
        "nanochat_core.worker",
        str(path),
    ]


def _environment(
    job: Job, processes: int, *, root: Path | None, steps: int | None
) -> dict[str, str]:
    """The worker's environment: ours, and what makes it repeatable and its log complete."""
    threads = str(job.resources.threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # A waiting OpenMP thread spins this often before it sleeps. By default it spins for long,
        # which beside another busy program costs up to nine tenths of the speed; never spinning
        # costs a sixth on an idle machine (docs/LOG.md, 2026-11-21).
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",  # a folder called `tasks` where we were started is not ours
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        LAUNCHER_VARIABLE: str(os.getpid()),
        STEPS_VARIABLE: str(steps or ""),
    }
    if job.resources.determinism == "strict":
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else its sums depend on timing
    # Before what is installed; packages that are installed may not come before Python's own.
    if root is not None and str(root) not in (*site.getsitepackages(), site.getusersitepackages()):
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    if processes == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            environment.pop(name, None)
    return environment


def _supervise(
    command: list[str],
    environment: dict[str, str],
    log: IO[bytes],
    look: Callable[[], None],
    stop: threading.Event,
) -> int:
    """Run `command` to its end, looking at its events meanwhile; returns its exit code."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        while not stop.is_set():
            look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_BETWEEN_LOOKS)
                break
        else:
            _end(process)
        look()
    except BaseException:
        _end(process)
        raise
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to stop, wait while it saves, then insist."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(SECONDS_TO_STOP)
    except BaseException as error:  # too slow, or a second Ctrl-C
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


class _Tail:
    """Reads the whole lines that are appended to a file."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._offset = offset
        self._rest = b""

    @classmethod
    def after_last_attempt(cls, path: Path) -> "_Tail":
        """What a new attempt appends; the half line of a killed one is closed first."""
        with path.open("ab+") as file:
            size = file.tell()
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    size += file.write(b"\n")
        return cls(path, size)

    def pass_to(self, on_event: OnEvent) -> None:
        """Pass on every event written since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        self._offset += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # a line that a full disk cut short
                event: Any = json.loads(line)
                if isinstance(event, dict):
                    on_event(cast("dict[str, Any]", event))


def _classify(job: Job, returncode: int, *, asked_to_stop: bool, first_rank: int) -> Result:
    """The files decide; exit codes are lost behind torchrun.

    When a rank fails, torchrun interrupts the others, and when all are asked to stop, a slow rank
    may fail because a quick one is gone: what was written first is the cause.
    """
    error = _read_error(job.directory / "error.json")
    result = Result.find(job.directory)
    is_interrupted = result is not None and result.status == "interrupted"
    is_ended_by_hand = asked_to_stop or returncode in (-signal.SIGINT, -signal.SIGTERM)
    was_stopped = is_ended_by_hand and result is None and error is None  # before it could say so
    if was_stopped or (is_interrupted and not _error_came_first(job)):
        raise StageInterrupted(
            f"{job.stage} was interrupted", hint="run the same command again: it goes on from there"
        )
    if error is not None:
        raise _failure(job, error, first_rank=first_rank)
    if result is not None:
        return result
    raise JobFailed(
        f"{job.stage} ended without a result: {_how_it_ended(returncode)}",
        hint=_hint_for_bug(job),
        log_tail=_log_tail(job, local_rank=None),
    )


def _failure(job: Job, error: dict[str, Any], *, first_rank: int) -> StageError:
    if error["expected"]:
        return StageError(f"{job.stage}: {error['message']}", hint=error["hint"])
    first_line = (error["message"].splitlines() or [""])[0]
    return JobFailed(
        f"{job.stage} failed on rank {error['rank']}: {error['type']}: {first_line}",
        hint=_hint_for_bug(job),
        log_tail=_log_tail(job, local_rank=error["rank"] - first_rank),
        cause=error["type"],
    )


def _hung(job: Job, hang: Hang, *, is_alone: bool) -> JobFailed:
    log = _log_tail(job, local_rank=hang.rank)  # of node 0, where both are the same
    place = find_place(log)
    steps = f", after {hang.steps} steps" if hang.steps else ""
    where = f"{hang.doing}{steps}" + (f", at {place}" if place else "")
    of_all = "" if is_alone else ", of those on node 0,"  # it may be another's that hangs
    return JobFailed(
        f"{job.stage} hangs: nothing has moved for {hang.seconds:.0f} seconds; rank {hang.rank}"
        f"{of_all} stopped first ({where})",
        hint="run the same command again: it resumes from what was saved; if the machine is "
        f"only slow, with --place hang_seconds={4 * job.resources.hang_seconds:g}",
        log_tail=log,
    )


def _hint_for_bug(job: Job) -> str:
    return f"its log is {job.directory / 'worker.log'}; replay it with: {replay_line(job)}"


def _error_came_first(job: Job) -> bool:
    error, result = job.directory / "error.json", job.directory / "result.json"
    return error.exists() and error.stat().st_mtime_ns <= result.stat().st_mtime_ns


def _read_error(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    reason = " (is the machine out of memory?)" if name == "SIGKILL" else ""
    return f"killed by {name}{reason}"


def _log_tail(job: Job, *, local_rank: int | None) -> str:
    """The last lines of the failing rank's own log where torchrun kept one, else of worker.log."""
    path = job.directory / "worker.log"
    if local_rank is not None:
        logs = job.directory.glob(f"ranks/*/attempt_*/{local_rank}/stderr.log")
        path = max(logs, key=lambda log: log.stat().st_mtime, default=path)
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
