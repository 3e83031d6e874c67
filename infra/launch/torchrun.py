"""Start one job's worker processes on this machine, watch them, and report how the job ended.

One process of a machine runs directly; several run under torchrun, which imports torch before it
starts them. On several machines (rendezvous.py) each starts and watches its own. The workers write
to files and never to a pipe of ours, so they outlive us long enough to save.
"""

import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from infra.launch.compile_cache import compile_cache
from infra.launch.earlier import earlier_workers_ended
from infra.launch.fitting import note_too_large
from infra.launch.rendezvous import Rendezvous
from infra.launch.watchdog import Watchdog, heartbeats_of
from infra.polling import POLL_SECONDS
from nanochat_core.errors import OutOfMemory, StageError
from nanochat_core.job import Job, Result
from nanochat_core.runtime.heartbeat import Heartbeat, forget_heartbeats
from nanochat_core.worker import LAUNCHER_VARIABLE, STEPS_VARIABLE

OnEvent: TypeAlias = Callable[[dict[str, Any]], None]

# Of the job's `grace_seconds`, for torchrun to kill its ranks before it is killed itself. A worker
# ends before both (runtime/interrupt.py).
_SECONDS_TO_KILL = 3.0
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MIN_FREE = 65_536  # bytes: with less a worker could not write why it failed
_TAIL_BYTES = 3000
_TAIL_LINES = 20


class StageInterrupted(StageError):
    """A job that was asked to stop. It resumes from its checkpoint when it is started again."""


class JobFailed(StageError):
    """A job that ended without a result, by a bug of ours or a failure of the machine."""

    def __init__(
        self, message: str, *, hint: str | None, log_tail: str, cause: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.log_tail = log_tail  # the last lines the failing process wrote
        self.cause = cause  # the exception's type; None if it was killed or hung


def run_job(
    job: Job,
    *,
    processes: int,
    on_event: OnEvent,
    stop: threading.Event | None = None,
    check: Callable[[], None] = lambda: None,
    root: Path | None = None,
    steps: int | None = None,
    rendezvous: Rendezvous | None = None,
) -> Result:
    """Run `job` in `processes` workers until it ends; each progress event is passed to `on_event`.

    The job resumes from what an unfinished attempt left in its directory. Setting `stop`, in
    `on_event` or from another thread, ends the job as SIGTERM would. Any exception while the
    workers run (Ctrl-C, a cancelled flow run, an error of `on_event` or of `check`, which is called
    all the time and at the end) stops them before it is raised. With `root` the workers run the
    code of the repository in that directory. With `steps` they are interrupted after so many steps,
    their state saved, unless they finish earlier. With a `rendezvous` they are this machine's part
    of a job of several machines, `processes` on each. Only node 0 has the result; elsewhere an
    empty result means that the ranks here ended well, and JobFailed that they did not: node 0 has
    the reason.

    Raises StageInterrupted if the job saved and stopped, JobFailed if it broke or made no progress
    for the resources' `hang_seconds`, OutOfMemory if half the device batch may fit, and StageError
    with the worker's own message and hint for an error that a person can repair.
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
        # Under the locks: an earlier worker may still have written its own result.
        for name in ("result.json", "error.json"):
            (job.directory / name).unlink(missing_ok=True)
        forget_heartbeats(heartbeats_of(job))
        events = _Tail(job.events)
    # Only node 0 has a watchdog: a rank that hangs elsewhere stops its ranks too. Ranks of other
    # nodes may rightly be silent while rank 0 waits for its disk or for their files.
    watch = None if rendezvous is not None and rendezvous.node else Watchdog(job)
    first_rank = rendezvous.first_rank(processes) if rendezvous else 0
    compiles = job.resources.compile or job.resources.device == "cuda"

    def look() -> None:
        events.pass_to(on_event)
        check()
        if watch is not None and (hang := watch.find_hang()):
            watch.dump_stacks()
            raise _hung(job, *hang, is_alone=rendezvous is None)

    with (job.directory / "worker.log").open("wb") as worker_log:
        returncode = _supervise(
            _command(path, processes, rendezvous),
            _environment(job, processes, root=root, steps=steps)
            | (compile_cache(log, fallback=job.directory / "torch-compile") if compiles else {})
            | (rendezvous.environment() if rendezvous else {})
            | (rendezvous.rank_environment() if rendezvous and processes == 1 else {}),
            worker_log,
            look,
            stop,
            grace=job.resources.grace_seconds,
        )
    if first_rank and not returncode:
        return Result(status="finished", metrics={})
    # A signal from elsewhere ends a job that is alone; one of several machines is lost by it.
    is_stopped = stop.is_set() or (
        rendezvous is None and returncode in (-signal.SIGINT, -signal.SIGTERM)
    )
    return _classify(
        job,
        returncode,
        is_stopped=is_stopped,
        first_rank=first_rank if processes > 1 else None,
    )


def _command(path: Path, processes: int, rendezvous: Rendezvous | None) -> list[str]:
    if processes == 1:
        return [sys.executable, "-m", "nanochat_core.worker", str(path)]
    return [
        sys.executable,
        "-m",
        "infra.launch.agent",
        *(rendezvous.torchrun_args() if rendezvous else ["--rdzv-backend=loopback"]),
        f"--nproc-per-node={processes}",
        "--redirects=3",  # stdout and stderr of each rank to files of its own
        f"--log-dir={path.parent / 'ranks'}",
        "-m",
        "nanochat_core.worker",
        str(path),
    ]


def _environment(
    job: Job, processes: int, *, root: Path | None, steps: int | None
) -> dict[str, str]:
    """Return the worker's environment: ours, with what makes runs repeatable and logs complete."""
    threads = str(job.resources.threads)
    environment = {
        # Without torchrun's options: PET_MAX_RESTARTS, say, of Kubeflow would have ours start ranks
        # again, after one has written the job's error.
        **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Of the processes in which torch compiles kernels: by default each of 8 ranks starts 32.
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", threads),
        # A waiting OpenMP thread spins this often before it sleeps. By default it spins for long,
        # which next to another busy program costs up to nine tenths of the speed; never spinning
        # costs a sixth on an idle machine (docs/LOG.md, 2026-11-21).
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
        "PYTHONHASHSEED": "0",
        "PYTHONSAFEPATH": "1",  # do not import a folder `tasks` of the current directory
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # Not torchrun's option: before torch 2.13 there is none and the limit is 30 s, longer than
        # the default grace, so that a rank that ignores SIGTERM is left to the next attempt, which
        # kills it.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(job.resources.grace_seconds - _SECONDS_TO_KILL)),
        LAUNCHER_VARIABLE: str(os.getpid()),
        STEPS_VARIABLE: str(steps or ""),
    }
    if job.resources.determinism == "strict":
        # Without a fixed workspace cuBLAS may sum in an order that depends on timing.
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # `root` comes before the installed packages. If it is site-packages itself it is left out: on
    # PYTHONPATH it would come before the standard library.
    if root is not None and str(root) not in (*site.getsitepackages(), site.getusersitepackages()):
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    # Of a torchrun around this process: a single worker would take itself for one of its ranks.
    if processes == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)
    return environment


def _supervise(
    command: list[str],
    environment: dict[str, str],
    log: IO[bytes],
    look: Callable[[], None],
    stop: threading.Event,
    *,
    grace: float,
) -> int:
    """Run `command` to its end, calling `look` meanwhile; return its exit code."""
    # Popen runs in the thread that watches: the kernel's parent-death signal, which keeps orphans
    # from training on, is sent when this thread ends.
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        while not stop.is_set():
            look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
                break
        else:
            _end(process, grace)
        look()  # once more, for the events of the last moment
    except BaseException:
        _end(process, grace)
        raise
    return process.returncode


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Send SIGTERM, wait for `grace` seconds while the process saves, then kill it."""
    if process.poll() is not None:
        return
    process.terminate()
    # torchrun passes SIGTERM on to its ranks, and kills them a little earlier.
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    finally:  # too slow, or a second Ctrl-C
        if process.poll() is None:
            process.kill()
            process.wait()


class _Tail:
    """The complete lines that are appended to a file, whose last, partial line it closes first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rest = b""
        with path.open("ab+") as file:
            self._offset = file.tell()
            if self._offset:
                file.seek(self._offset - 1)
                if file.read(1) != b"\n":
                    self._offset += file.write(b"\n")

    def pass_to(self, on_event: OnEvent) -> None:
        """Pass every event written since the last call to `on_event`."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        self._offset += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # a line truncated by a full disk
                event: Any = json.loads(line)
                if isinstance(event, dict):
                    on_event(cast("dict[str, Any]", event))


def _classify(job: Job, returncode: int, *, is_stopped: bool, first_rank: int | None) -> Result:
    """Return the job's result, or raise what its files report: torchrun hides exit codes.

    `first_rank` is None if no torchrun keeps the ranks' logs.
    """
    path = job.directory / "error.json"
    error: Any = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    result = Result.find(job.directory)
    is_interrupted = result is not None and result.status == "interrupted"
    was_stopped = is_stopped and result is None and error is None  # before it could write either
    # When a rank fails, torchrun interrupts the others; when all are asked to stop, a slow rank may
    # fail because a quick one is gone. The file that was written first has the cause.
    if was_stopped or (is_interrupted and not _error_came_first(job)):
        raise StageInterrupted(
            f"{job.stage} was interrupted", hint="run the same command again to resume it"
        )
    if error is not None:
        raise _failure(job, error, first_rank=first_rank)
    if result is not None:
        return result
    if returncode > 0 and shutil.disk_usage(job.directory).free < _MIN_FREE:
        raise disk_full(job.stage, job.directory)
    raise JobFailed(
        f"{job.stage} ended without a result: {_how_it_ended(returncode)}",
        hint=_hint_for_bug(job),
        log_tail=_log_tail(job, local_rank=None),
    )


def disk_full(stage: str, path: object) -> StageError:
    """Return the error of a stage that could not write to `path`."""
    return StageError(
        f"{stage}: no space left on device: {path}",
        hint="free some space and run again: the job resumes from here",
    )


def _failure(job: Job, error: dict[str, Any], *, first_rank: int | None) -> StageError:
    if error["type"] == OutOfMemory.__name__:
        note_too_large(job)
        return OutOfMemory(f"{job.stage}: {error['message']}", hint=error["hint"])
    if error["expected"]:
        return StageError(f"{job.stage}: {error['message']}", hint=error["hint"])
    first_line = (error["message"].splitlines() or [""])[0]
    return JobFailed(
        f"{job.stage} failed on rank {error['rank']}: {error['type']}: {first_line}",
        hint=_hint_for_bug(job),
        log_tail=_log_tail(
            job, local_rank=None if first_rank is None else error["rank"] - first_rank
        ),
        cause=error["type"],
    )


def _hung(job: Job, first: Heartbeat, seconds: float, *, is_alone: bool) -> JobFailed:
    steps = f", after {first.steps} steps" if first.steps else ""
    of_all = "" if is_alone else ", of those on node 0,"  # it may be another's that hangs
    return JobFailed(
        f"{job.stage} hangs: nothing has moved for {seconds:.0f} seconds; rank {first.rank}"
        f"{of_all} stopped first ({first.doing}{steps})",
        hint="if it is not retried by itself, run the same command again: it resumes from what was "
        "saved; if the machine is only slow, with "
        f"--place hang_seconds={4 * job.resources.hang_seconds:g}",
        log_tail=_log_tail(job, local_rank=first.rank),  # with its stack; of node 0
    )


def _hint_for_bug(job: Job) -> str:
    replay = f"python -P -m nanochat_core.worker {shlex.quote(str(job.directory / 'job.json'))}"
    return f"its log is {job.directory / 'worker.log'}; replay it with: {replay}"


def _error_came_first(job: Job) -> bool:
    error, result = job.directory / "error.json", job.directory / "result.json"
    return error.exists() and error.stat().st_mtime_ns <= result.stat().st_mtime_ns


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    name = signal.Signals(-returncode).name
    reason = " (is the machine out of memory?)" if name == "SIGKILL" else ""
    return f"killed by {name}{reason}"


def _log_tail(job: Job, *, local_rank: int | None) -> str:
    """Return the last lines of the failing rank's own log if it has one, else of worker.log."""
    path = job.directory / "worker.log"
    if local_rank is not None:
        logs = job.directory.glob(f"ranks/*/attempt_*/{local_rank}/stderr.log")
        path = max(logs, key=lambda log: log.stat().st_mtime, default=path)
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
