"""Run one job: `python -m nanochat_core.worker JOB.json`, alone or as every rank of torchrun.

The worker uses local directories only. It writes result.json (finished or interrupted) or
error.json. Its exit code has the same meaning, but torchrun does not pass it on.
"""

import ctypes
import errno
import faulthandler
import fcntl
import gc
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from nanochat_core.errors import NanochatError
from nanochat_core.job import Job, Result, digests_of, write_json
from nanochat_core.runtime import interrupt
from nanochat_core.runtime.code_record import record_code
from nanochat_core.runtime.heartbeat import HEARTBEAT
from nanochat_core.runtime.metrics import write_metrics
from nanochat_core.runtime.process_start import this_process
from nanochat_core.runtime.trackers import following
from nanochat_core.runtime.versions import versions_in_use

_PR_SET_PDEATHSIG = 1
LAUNCHER_VARIABLE = "NANOCHAT_LAUNCHER"  # process id of the launcher
# For processes that a stage starts: the code directory, and the packages outside this repository.
RECORD_VARIABLE = "NANOCHAT_CODE_RECORD"
PLUGINS_VARIABLE = "NANOCHAT_PLUGINS"  # separated by spaces
STEPS_VARIABLE = "NANOCHAT_STEPS"  # save and interrupt the job after this many steps


def main(arguments: list[str]) -> int:
    """Run the job file named in `arguments`; return the exit code."""
    die_with_parent()
    interrupt.install()
    # The launcher sends SIGUSR1 to a job that hangs, for its stack traces.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if steps := os.environ.get(STEPS_VARIABLE):
        interrupt.STOP.steps_left = int(steps)
    job = Job.read(Path(arguments[0]))
    interrupt.STOP.allow(job.resources.grace_seconds)
    os.environ[RECORD_VARIABLE] = str(job.code)
    os.environ[PLUGINS_VARIABLE] = " ".join(job.plugins)
    # Before any code of the stage is imported.
    record_code(job.code, job.plugins)
    set_up_cublas(job)
    rank = int(os.environ.get("RANK", "0"))
    with _only_worker(job, rank):
        return _run(job, rank)


def _run(job: Job, rank: int) -> int:
    if rank == 0:
        # Only without a launcher, which removes them before it starts the ranks: here another
        # rank may already have failed and written error.json.
        if LAUNCHER_VARIABLE not in os.environ:
            for name in ("result.json", "error.json"):
                (job.directory / name).unlink(missing_ok=True)
        job.output.mkdir(exist_ok=True)
        job.checkpoints.mkdir(exist_ok=True)
        _remove_half_files(job.output)
    HEARTBEAT.open(job.directory / "ranks", rank)
    try:
        with following(job, active=rank == 0):
            metrics = _load(job.entry).run(job)
        if rank == 0:
            versions = versions_in_use()  # before write_metrics, which loads pyarrow
            write_metrics(job)
            output = digests_of(job.output, beat=lambda: HEARTBEAT.beat("hashing the output"))
            interrupt.ignore()
            # Last: result.json means that everything else is written.
            result = Result(status="finished", metrics=metrics, output=output, versions=versions)
            result.write(job.directory)
    except interrupt.Interrupted:
        # The launcher may repeat the signal, which must not interrupt writing the result.
        interrupt.ignore()
        if rank == 0:
            Result(status="interrupted", metrics={}).write(job.directory)
        return interrupt.EXIT_CODE
    except Exception as error:  # noqa: BLE001 - every failure is recorded, then reported
        _write_error(job, rank, error)
        return 1
    return 0


def _load(entry: str) -> ModuleType:
    """Import the stage's module, with garbage collection off: that saves 0.4 CPU seconds."""
    gc.disable()
    try:
        return importlib.import_module(entry)
    finally:
        gc.enable()


def leave(code: int) -> NoReturn:
    """End this process without exit hooks; after a failure without waiting for other ranks.

    The hooks of torch take 0.6 CPU seconds, those of a tracker may wait for a dead service.
    """
    try:
        if code != 1 and "torch" in sys.modules:  # closing the process group waits for other ranks
            importlib.import_module("nanochat_core.runtime.hardware.distributed").close_world()
    except Exception:  # noqa: BLE001 - the result is written, and the exit code is part of it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux to send this signal when the launcher dies, so that no orphan continues."""
    if sys.platform == "linux":
        launcher = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
        # The request does not act on a parent that has already died.
        if os.getppid() != launcher:
            sys.exit(interrupt.EXIT_CODE)


def set_up_cublas(job: Job) -> None:
    """Make cuBLAS deterministic under determinism "strict".

    The launcher sets this too, but a job can also be run without one.
    """
    # cuBLAS reads the variable at its first use, so it must be set before torch is imported.
    if job.resources.determinism == "strict":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _only_worker(job: Job, rank: int) -> IO[Any]:
    """Wait until an earlier attempt's worker has saved and ended; return the lock.

    The lock ends with the process. Its file names this process, so that a launcher can kill it if
    it hangs.
    """
    lock = (job.directory / f"worker-{rank}.lock").open("a", encoding="utf-8")
    fcntl.flock(lock, fcntl.LOCK_EX)
    this_process().write(lock)
    return lock


def _remove_half_files(directory: Path) -> None:
    """Delete incomplete files of a killed attempt: complete files never have such names."""
    for path in directory.rglob(".*.tmp"):
        path.unlink()


def _write_error(job: Job, rank: int, error: Exception) -> None:
    """Write error.json, unless another rank has: the first failure causes the others."""
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    path = job.directory / "error.json"
    if not path.exists():
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        is_ours = isinstance(error, NanochatError)
        hint = error.hint if is_ours else "free some space and run again: the job resumes from here"
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


if __name__ == "__mp_main__":  # a process that a stage spawned; it has loaded no code of ours yet
    record_code(Path(os.environ[RECORD_VARIABLE]), os.environ[PLUGINS_VARIABLE].split())
if __name__ == "__main__":
    leave(main(sys.argv[1:]))
