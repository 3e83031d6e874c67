import os
import signal
import threading

import psutil
import pytest

from tasks import registry
from tasks.sandbox.run import protections, run_all
from tests.campaigns.security.sandbox import CHECK, WRONG
from tests.integration.tasks.test_sandbox import needs_a_sandbox
from tests.support.tasks.sandbox_forgeries import RIGHT

__all__ = ["needs_a_sandbox"]

LIMITS = {"seconds": 600.0, "memory_mb": 512}


def test_verdicts_come_in_the_order_of_the_programs():
    programs = [RIGHT, WRONG, f"import time; time.sleep(0.3)\n{RIGHT}", WRONG, RIGHT]
    verdicts = run_all([(program, CHECK) for program in programs], **LIMITS)
    assert [verdict.passed for verdict in verdicts] == [True, False, True, False, True]


def test_the_same_program_runs_once_for_a_check():
    program = f"import random\nprint(random.random())\n{RIGHT}"
    verdicts = run_all([(program, CHECK)] * 9, **LIMITS)
    assert len({verdict.output for verdict in verdicts}) == 1


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
    run_all([(f"x = {i}", CHECK) for i in range(9)], **LIMITS)
    assert most == 3


def is_dead_or_sandbox(child):
    """Return False for what other threads of this test process have started."""
    try:
        command = [*protections().command]
        return child.cmdline()[-len(command) :] == command or child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_interrupts_the_wait_ends_all_that_run():
    others = set(psutil.Process().children())
    old = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_all([(f"while True: pass\n# {i}", CHECK) for i in range(50)], **LIMITS)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, old)
    left = set(psutil.Process().children()) - others
    assert [child for child in left if is_dead_or_sandbox(child)] == []
    assert not [t for t in threading.enumerate() if t.name.startswith("sandbox")]


def test_a_task_grades_many_answers_at_a_time():
    question = {"messages": [{"role": "user", "content": CHECK.setup}], "entry_point": "add"}
    graded = [(question | {"test": CHECK.test}, answer) for answer in (RIGHT, WRONG, RIGHT, "")]
    assert registry.are_correct("humaneval", graded) == [True, False, True, False]
    assert registry.are_correct("humaneval", []) == []
    assert registry.grader_of("humaneval").is_correct(*graded[0])
