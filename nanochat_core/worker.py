"""Runs one job: `python -m nanochat_core.worker JOB.json`, alone or as every rank of torchrun.

The worker knows local directories and numbers. It leaves result.json (finished or interrupted) or
error.json; its exit code says the same but is lost behind torchrun, so nobody relies on it.
"""

import ctypes
import errno
import faulthandler
import fcntl
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn

from nanochat_core.errors import NanochatError
from nanochat_core.job import Job, Result, digests_of, write_json
from nanochat_core.runtime import interrupt
from nanochat_core.runtime.code_record import record_code
from nanochat_core.runtime.heartbeat import HEART
from nanochat_core.runtime.metrics import write_metrics
from nanochat_core.runtime.process_start import this_process
from nanochat_core.runtime.trackers import following, may_linger
from nanochat_core.runtime.versions import versions_in_use

_PR_SET_PDEATHSIG = 1
LAUNCHER_VARIABLE = "NANOCHAT_LAUNCHER"  # process id of who started this process
RECORD_VARIABLE = "NANOCHAT_CODE_RECORD"  # where a process that a stage starts records its code
STEPS_VARIABLE = "NANOCHAT_STEPS"  # the job is interrupted after so many, its state saved


def main(arguments: list[str]) -> int:
    """Run the job file named in `arguments`; returns the exit code."""
    die_with_parent()
    interrupt.install()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the launcher asks where we stand
    if steps := os.environ.get(STEPS_VARIABLE):
        interrupt.STOP.steps_left = int(steps)
    job = Job.read(Path(arguments[0]))
    os.environ[RECORD_VARIABLE] = str(job.code)
    record_code(job.code)
    set_up_cublas(job)
    rank = int(os.environ.get("RANK", "0"))
    with _only_worker(job, rank):
        return _run(job, rank)


def _run(job: Job, rank: int) -> int:
    if rank == 0:
        if LAUNCHER_VARIABLE not in os.environ:  # replayed by hand; a launcher does it before us:
            for name in ("result.json", "error.json"):  # by now another rank may have failed
                (job.directory / name).unlink(missing_ok=True)
        job.output.mkdir(exist_ok=True)
        job.checkpoints.mkdir(exist_ok=True)
        _remove_half_files(job.output)
    HEART.open(job.directory / "ranks", rank)
    try:
        with following(job, active=rank == 0):
            metrics = importlib.import_module(job.entry).run(job)
    except interrupt.Interrupted:
        interrupt.ignore()
        if rank == 0:
            Result(status="interrupted", metrics={}).write(job.directory)
        return interrupt.EXIT_CODE
    except Exception as error:  # noqa: BLE001 - every failure is recorded, then reported
        _write_error(job, rank, error)
        return 1
    if rank == 0:
        versions = versions_in_use()  # before the log loads pyarrow
        write_metrics(job)
        Result(
            status="finished",
            metrics=metrics,
            output=digests_of(job.output, beat=lambda: HEART.beat("hashing the output")),
            versions=versions,
        ).write(job.directory)
    return 0


def leave(code: int) -> NoReturn:
    """End this process, whatever would like to wait."""
    failed = code == 1  # the process group is left as it is: ending it would wait for other ranks
    if failed or may_linger():
        if not failed and "torch" in sys.modules:
            importlib.import_module("nanochat_core.runtime.hardware.distributed").close_world()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def die_with_parent() -> None:
    """Ask Linux for SIGTERM when the launcher dies, so that no orphan goes on training."""
    if sys.platform == "linux":
        launcher = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != launcher:  # it died before the request
            sys.exit(interrupt.EXIT_CODE)


def set_up_cublas(job: Job) -> None:
    """Have cuBLAS repeat its sums under determinism "strict"; it looks when it is first used.

    The launcher sets this too, but a job may be run by hand.
    """
    if job.resources.determinism == "strict":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _only_worker(job: Job, rank: int) -> IO[Any]:
    """Wait until an earlier attempt's worker has saved; the lock ends with the process.

    The file names this process, so that a launcher can end it when it is stuck.
    """
    lock = (job.directory / f"worker-{rank}.lock").open("a", encoding="utf-8")
    fcntl.flock(lock, fcntl.LOCK_EX)
    this_process().write(lock)
    return lock


def _remove_half_files(directory: Path) -> None:
    """Drop what a killed attempt was writing: whole files never have such names."""
    for path in directory.rglob(".*.tmp"):
        path.unlink()


def _write_error(job: Job, rank: int, error: Exception) -> None:
    """The first failing rank explains; the others fail because of it."""
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    path = job.directory / "error.json"
    if not path.exists():
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        is_ours = isinstance(error, NanochatError)
        hint = error.hint if is_ours else "free some space and run again: it goes on from here"
        write_json(
            path,
            {
                "rank": rank,
                "type": type(error).__name__,
                "message": str(error),
                "hint": hint if is_ours or is_full else None,
                "expected": is_ours or is_full,
                "traceback": text,
            },
        )


if __name__ == "__mp_main__":  # a process that a stage started, before it loads what it runs
    record_code(Path(os.environ[RECORD_VARIABLE]))
if __name__ == "__main__":
    leave(main(sys.argv[1:]))
