"""Keep one pool's worker running, suspend or end it, and follow the processes of its runs."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from infra.prefect.supervisor.managed_process import ManagedProcess
from infra.prefect.supervisor.processes import SECONDS_TO_SAVE, Attempt, attempts_of
from infra.prefect.supervisor.runs import is_polling
from infra.prefect.supervisor.workers import Pool, worker_command, worker_environment

_SECONDS_TO_DIE = 8.0  # a worker that is asked to end outlives its runs by less


class PrefectWorker:
    """One pool's worker and the processes of its runs."""

    def __init__(
        self, pool: Pool, home: Path, store: str | None, *, say: Callable[[str], None]
    ) -> None:
        self.pool = pool
        self.child = ManagedProcess(
            pool.name, worker_command(pool), log=home / "prefect" / f"worker-{pool.name}.log"
        )
        self._home = home
        self._store = store
        self._say = say
        self._attempts: dict[int, Attempt] = {}  # by pid
        # Those that ended in the last _SECONDS_TO_DIE, with the time in monotonic seconds.
        self._ended: list[tuple[float, Attempt]] = []
        self._orphans: list[Attempt] = []  # of a worker that is gone

    @property
    def attempts(self) -> list[Attempt]:
        """Return every run whose process is not known to have ended."""
        return [*self._attempts.values(), *self._orphans]

    def look(self, api_url: str) -> list[str]:
        """Restart the worker if it ended; return the flow runs that were lost with the last one."""
        if (code := self.child.ended()) is not None:
            wait = self.child.pause.ended()
            self._say(f"worker {self.pool.name}: ended ({code}); again in {wait:g} s")
            # A worker that is asked to end kills its runs and does not report them to Prefect, so
            # those that ended just before it are lost too.
            self._orphans += [*self._attempts.values(), *(ended for _, ended in self._ended)]
            self._attempts, self._ended = {}, []
        self._count()
        for attempt in self._orphans:
            attempt.end(SECONDS_TO_SAVE)
        over = [attempt for attempt in self._orphans if attempt.is_over]
        self._orphans = [attempt for attempt in self._orphans if attempt not in over]
        # The next worker waits for the orphans: until they end, the GPU is theirs.
        if self.child.pid is None and self.child.pause.is_over and not self._orphans:
            self._start(api_url)
        return [attempt.flow_run for attempt in over]

    def _start(self, api_url: str) -> None:
        try:
            pid = self.child.start(worker_environment(self._home, api_url, store=self._store))
        except OSError as error:  # no disk space or memory now: the other workers' runs continue
            wait = self.child.pause.ended()
            self._say(f"worker {self.pool.name}: {error.strerror}; again in {wait:g} s")
        else:
            self._say(f"worker {self.pool.name}: process {pid}")

    def is_ready(self, api_url: str) -> bool:
        """Return whether the worker polls for runs."""
        return not self.child.is_over and is_polling(
            api_url, self.pool.name, self.pool.worker, since=self.child.since
        )

    def hold(self) -> None:
        """Suspend the worker: it takes no other run, and does not kill those that save."""
        self.child.signal(signal.SIGSTOP)
        self._count()

    def stop(self) -> None:
        """Ask the worker to end, suspended or not."""
        # SIGTERM stays pending while it is suspended, so it takes no run once SIGCONT wakes it.
        self.child.signal(signal.SIGTERM)
        self.child.signal(signal.SIGCONT)

    def _count(self) -> None:
        if (pid := self.child.pid) is None:
            return
        now = time.monotonic()
        found = attempts_of(pid, self._attempts)
        # They may have been killed by a worker that is about to end; see `look`.
        ended = [(now, self._attempts[pid]) for pid in self._attempts.keys() - found.keys()]
        self._attempts = found
        self._ended = [item for item in self._ended + ended if now - item[0] < _SECONDS_TO_DIE]
