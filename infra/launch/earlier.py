"""Wait for the workers that an earlier attempt left behind, and end those that do not end.

A worker whose launcher was killed gets SIGTERM, saves and ends within the job's `grace_seconds`.
One that is stuck in C code never runs its signal handler, and would hold the job's directory, and
its GPU, for ever.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

from infra.polling import MARGIN_SECONDS, POLL_SECONDS
from infra.storage.files import try_flock
from nanochat_core.errors import StageError
from nanochat_core.job import Job
from nanochat_core.runtime.process_start import ProcessRef, kill


@contextlib.contextmanager
def earlier_workers_ended(
    job: Job, log: Callable[[str], None], stop: threading.Event
) -> Generator[bool]:
    """Hold the locks of the directory's workers; yields False if `stop` was set first.

    A worker that still holds its lock a little after the job's grace is killed. One that is no
    process of this boot and PID namespace is only waited for: here its number means another
    process, or none. So is one that did not write its name. Then the log says how to find either.
    Raises StageError if a worker to be killed belongs to another user.
    """
    limit = job.resources.grace_seconds + MARGIN_SECONDS
    with contextlib.ExitStack() as files:
        # Opened to append: writing would erase the name that the holder left in its lock file.
        paths = job.directory.glob("worker-*.lock")
        pending = {path: files.enter_context(path.open("a")) for path in paths}
        since: dict[ProcessRef | None, float] = {}  # None: a holder that has not written its name
        while True:
            pending = {path: file for path, file in pending.items() if not try_flock(file)}
            for path in pending:
                _look_at_holder(path, since, limit, log)
            if not pending or stop.wait(POLL_SECONDS):
                break
        # The locks are held until the files are closed, so no new worker starts in the block.
        yield not pending


def _look_at_holder(
    path: Path,
    since: dict[ProcessRef | None, float],
    seconds: float,
    log: Callable[[str], None],
) -> None:
    """Log the holder of a lock when it is first seen; kill it `seconds` later, or log why not.

    `since` has the monotonic time at which each holder was first seen or killed; infinity means
    that it cannot be killed.
    """
    holder, now = ProcessRef.find(path), time.monotonic()
    if holder not in since:
        since[holder] = now
        of = f"{holder} of " if holder else ""
        log(f"waiting for {of}an earlier attempt to save")
    elif now - since[holder] <= seconds:
        return
    elif holder is not None and _kill(holder):
        since[holder] = now
        log(f"killed {holder} of an earlier attempt: it had not ended after {seconds:g} s")
    else:
        since[holder] = math.inf  # logged once
        log(
            f"{holder or 'a process'} of an earlier attempt has not ended after {seconds:g} s and "
            f"cannot be killed from here; find it with: fuser {path}"
        )


def _kill(holder: ProcessRef) -> bool:
    try:
        return kill(holder)
    except PermissionError as error:
        raise StageError(
            f"{holder} of an earlier attempt belongs to another user and does not end",
            hint=f"as that user: kill -9 {holder.pid}",
        ) from error
