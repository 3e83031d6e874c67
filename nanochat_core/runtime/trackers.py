"""Send metrics to wandb or trackio in the background, without ever delaying or failing the job.

A thread of rank 0's process follows events.jsonl, the job's own record, which is the only queue for
a slow service. Any error is logged once and ends the thread; at the end of the job it has some
seconds to catch up, then it is abandoned. Both packages are imported only here and only on request;
their own environment variables configure where they send.
"""

import contextlib
import importlib
import json
import os
import threading
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO

from nanochat_core.errors import first_line
from nanochat_core.job import Job
from nanochat_core.runtime.progress import Progress

PROJECT = "nanochat-flows"
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_CATCH_UP = 10.0


@contextlib.contextmanager
def following(job: Job, *, active: bool) -> Generator[None]:
    """While the block runs, forward the job's metrics to the trackers in its resources."""
    if not (active and job.resources.sinks):
        yield
        return
    # Daemons, so that a service that does not answer cannot keep the process alive.
    ended = threading.Event()
    start = job.events.stat().st_size if job.events.exists() else 0  # what earlier jobs logged
    threads = [
        threading.Thread(target=_follow, args=(job, name, start, ended), name=name, daemon=True)
        for name in job.resources.sinks
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(_SECONDS_TO_CATCH_UP)


def _follow(job: Job, name: str, start: int, ended: threading.Event) -> None:
    progress = Progress(job.events)
    try:
        sink = importlib.import_module(name)
        run = sink.init(
            project=PROJECT,
            name=f"{job.stage}-{job.fingerprint[:12]}",
            config={"stage": job.stage, "fingerprint": job.fingerprint, **job.config},
        )
        with job.events.open("a+b") as file:
            file.seek(start)
            is_last = False
            while not is_last:
                # Waited for before reading, so that the last round reads what was logged last.
                is_last = ended.wait(_SECONDS_BETWEEN_LOOKS)
                for event in _new_events(file):
                    if event["kind"] in ("step", "eval"):
                        run.log(event["values"], step=event["step"])
        run.finish()
    except ImportError:
        progress.message(f"{name} is not installed: metrics are in events.jsonl only")
    except BaseException as error:  # noqa: BLE001 - a tracker's failure must not end the job
        why = f"{type(error).__name__}: {first_line(error)}"
        progress.message(f"{name} gets no more metrics: {why}")


def _new_events(file: BinaryIO) -> Iterator[dict[str, Any]]:
    """Yield the events of complete lines written since the last call."""
    while (line := file.readline()).endswith(b"\n"):
        with contextlib.suppress(ValueError):
            yield json.loads(line)
    file.seek(-len(line), os.SEEK_CUR)  # a line that is being written is read next time
