"""Send metrics to wandb or trackio in the background, without ever delaying or failing the job.

A thread of rank 0's process follows events.jsonl, the job's own record, which is the only queue for
a slow service. Any error is logged once and ends the thread; at the end of the job it has some
seconds to catch up, then it is abandoned. Both packages are imported only here and only on request;
their own environment variables configure where they send.
"""

import contextlib
import importlib
import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

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
    threads = [
        threading.Thread(
            target=_follow, args=(job, name, _Tail(job.events), ended), name=name, daemon=True
        )
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


def _follow(job: Job, name: str, tail: "_Tail", ended: threading.Event) -> None:
    progress = Progress(job.events)
    try:
        sink = importlib.import_module(name)
        run = sink.init(
            project=PROJECT,
            name=f"{job.stage}-{job.fingerprint[:12]}",
            config={"stage": job.stage, "fingerprint": job.fingerprint, **job.config},
        )
        while True:
            # Waited for before reading, so that the last round reads what the job logged last.
            is_last = ended.wait(_SECONDS_BETWEEN_LOOKS)
            for event in tail.read():
                if event["kind"] in ("step", "eval"):
                    run.log(event["values"], step=event["step"])
            if is_last:
                break
        run.finish()
    except ImportError:
        progress.message(f"{name} is not installed: metrics are in events.jsonl only")
    except BaseException as error:  # noqa: BLE001 - a tracker's failure must not end the job
        said = (str(error).splitlines() or [""])[0]
        progress.message(f"{name} gets no more metrics: {type(error).__name__}: {said}")


class _Tail:
    """A reader of the events that are appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """Return the events of complete lines written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        found: list[dict[str, Any]] = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found
