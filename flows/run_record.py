"""A run's record in the store while the run goes on: written whenever it knows more."""

import threading
import time
from dataclasses import replace

from flows.runs import Run, Status, timestamp, write_run
from infra.storage.base import Store


class RunRecord:
    """The record of one run. Its stages may be built at the same time."""

    def __init__(self, store: Store, run: Run) -> None:
        self._store = store
        self._run = run
        self._lock = threading.Lock()

    def write(self) -> None:
        """Put what is known into the store."""
        with self._lock:
            write_run(self._store, self._run)

    def add(self, stage: str, fingerprint: str) -> None:
        """Say that the run uses an artifact. Written each time, though it may be known already."""
        with self._lock:
            known = {**self._run.stages, stage: fingerprint}
            self._run = replace(self._run, stages=known)
            write_run(self._store, self._run)

    def end(self, status: Status, stages: dict[str, str] | None = None) -> Run:
        """Write the last record; `stages` are all artifacts, if they are known better by now."""
        with self._lock:
            self._run = replace(
                self._run,
                status=status,
                ended=timestamp(time.time()),
                stages=self._run.stages if stages is None else stages,
            )
            write_run(self._store, self._run)
        return self._run
