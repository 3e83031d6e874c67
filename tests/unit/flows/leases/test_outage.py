"""A store that does not answer is waited for, and the line says since when."""

import threading
import time

from flows.leases.held_lease import LeaseTimings
from flows.leases.outage import StoreWait, WaitLog
from infra.storage.base import StoreUnavailable
from tests.support.reliability.memory_store import MemoryStore

WORKED = 1.2  # seconds before the store was lost


def test_the_time_that_an_action_worked_is_not_counted_as_waiting():
    said: list[str] = []
    answers = iter([StoreUnavailable("lost"), None])

    def fetch() -> str:
        error = next(answers)
        if error is not None:
            time.sleep(WORKED)
            raise error
        return "fetched"

    wait = StoreWait(
        store=MemoryStore(),
        name="sft",
        waiting=WaitLog(said.append, every=60),
        stop=threading.Event(),
        terms=LeaseTimings(poll=0.01, max_poll=0.01),
    )
    assert wait(fetch) == "fetched"
    assert said == ["waiting: store not reached for 0 s (lost)"]
