"""A pool's worker as the keeper sees it: kept running, held, ended, and what its runs come to."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from infra.prefect.supervisor.managed_process import ManagedProcess
from infra.prefect.supervisor.processes import SECONDS_TO_SAVE, Attempt, attempts_of
from infra.prefect.supervisor.runs import is_polling
from infra.prefect.supervisor.workers import Pool, worker_command, worker_environment

_SECONDS_TO_DIE = 8.0  # from the end of its runs to that of a worker that was asked to end


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
        self._ended: list[tuple[float, Attempt]] = []  # lately: when, in monotonic seconds
        self._orphans: list[Attempt] = []  # of a worker that is gone

    @property
    def attempts(self) -> list[Attempt]:
        """Every run whose process is not known to have ended."""
        return [*self._attempts.values(), *self._orphans]

    def look(self, api_url: str) -> list[str]:
        """Start the worker if it is not there; gives flow runs that were lost with an earlier one.

        The next one waits until they have ended: a GPU is theirs until then.
        """
        if (code := self.child.ended()) is not None:
            wait = self.child.pause.ended()
            self._say(f"worker {self.pool.name}: ended ({code}); again in {wait:g} s")
            # One that is asked to end kills its runs first, and says nothing of them.
            self._orphans += [*self._attempts.values(), *(ended for _, ended in self._ended)]
            self._attempts, self._ended = {}, []
        self._count()
        for attempt in self._orphans:
            attempt.end(SECONDS_TO_SAVE)
        over = [attempt for attempt in self._orphans if attempt.is_over]
        self._orphans = [attempt for attempt in self._orphans if attempt not in over]
        if self.child.pid is None and self.child.pause.is_over and not self._orphans:
            self._start(api_url)
        return [attempt.flow_run for attempt in over]

    def _start(self, api_url: str) -> None:
        try:
            pid = self.child.start(worker_environment(self._home, api_url, store=self._store))
        except OSError as error:  # no disk or no memory for it now: the others' runs go on
            wait = self.child.pause.ended()
            self._say(f"worker {self.pool.name}: {error.strerror}; again in {wait:g} s")
        else:
            self._say(f"worker {self.pool.name}: process {pid}")

    def is_ready(self, api_url: str) -> bool:
        """Whether it looks for runs."""
        return not self.child.is_over and is_polling(
            api_url, self.pool.name, self.pool.worker, since=self.child.since
        )

    def hold(self) -> None:
        """Stop it where it is: it takes no other run, and does not kill those that save."""
        self.child.signal(signal.SIGSTOP)
        self._count()

    def stop(self) -> None:
        """Have it end, held or not."""
        self.child.signal(signal.SIGTERM)
        self.child.signal(signal.SIGCONT)

    def _count(self) -> None:
        if (pid := self.child.pid) is None:
            return
        now = time.monotonic()
        found = attempts_of(pid, self._attempts)
        ended = [(now, self._attempts[pid]) for pid in self._attempts.keys() - found.keys()]
        self._attempts = found
        self._ended = [item for item in self._ended + ended if now - item[0] < _SECONDS_TO_DIE]
