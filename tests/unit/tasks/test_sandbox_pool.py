"""How many programs are graded at a time."""

import threading

from tasks.sandbox.run import run_all
from tests.campaigns.security.sandbox import CHECK


def test_one_runs_per_cpu(monkeypatch):
    in_flight, most, lock, three = 0, 0, threading.Lock(), threading.Barrier(3)

    def counted(*args, **kwargs):
        nonlocal in_flight, most
        with lock:
            in_flight += 1
            most = max(most, in_flight)
        three.wait(120)
        with lock:
            in_flight -= 1

    monkeypatch.setattr("tasks.sandbox.run.run_untrusted", counted)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 5})
    run_all([(f"x = {i}", CHECK) for i in range(9)], seconds=20.0, memory_mb=512)
    assert most == 3
