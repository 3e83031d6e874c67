"""A store in memory with a clock that tests set: what is old in it became so at once."""

import random
import threading
from collections.abc import Callable
from typing import Any

from tests.support.reliability.sim_store import Object, Objects, SimStore
from tests.support.reliability.sim_world import Process, Request

DAY, HOUR = 86400.0, 3600.0


class Calm:
    """A world in which every request takes effect at once. Any number of threads may ask."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.store_skew = 0.0
        self.rng = random.Random(0)
        self._lock = threading.RLock()

    def ask(self, request: Request, take_effect: Callable[[Request], Any]) -> Any:
        """Return the answer, or raise it."""
        with self._lock:
            answer = take_effect(request)
        if isinstance(answer, Exception):
            raise answer
        return answer


class MemoryStore(SimStore):
    """The simulation's objects, without its faults."""

    def __init__(self) -> None:
        world: Any = Calm()
        super().__init__(Objects(world), Process("memory", home="memory", skew=0.0))
        self.unfinished: list[float] = []  # when half written objects were begun
        self.deleted: list[str] = []  # keys, in order
        self.objects.on_effect = self._note

    @property
    def now(self) -> float:
        """Return the store's clock."""
        return self.objects.world.now

    @now.setter
    def now(self, now: float) -> None:
        self.objects.world.now = now

    def names(self, prefix: str = "") -> set[str]:
        """Return the keys of what there is."""
        return {key for key in list(self.objects.stored) if key.startswith(prefix)}

    def abort_stale_uploads(self, *, before: float) -> int:
        """See Store."""
        old = [begun for begun in self.unfinished if begun < before]
        self.unfinished = [begun for begun in self.unfinished if begun not in old]
        return len(old)

    def _note(self, request: Request, old: Object | None, new: Object | None) -> None:
        if new is None:
            self.deleted.append(request.key)
