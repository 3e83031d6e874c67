"""What a program may not do, and what becomes of one that tries.

The whole corpus, a run for each thing in it, is the campaign of tests.campaigns.security.sandbox.
"""

import os
import resource
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tasks.base import TaskError
from tasks.sandbox import backends, process
from tasks.sandbox.process import Verdict, run_in
from tasks.sandbox.run import protections, run_untrusted
from tests.campaigns.security.sandbox import (
    ENDS,
    gone_wrong,
    processes_of,
    run_alone,
    things_of_the_host,
)
from tests.support.tasks.sandbox_corpus import ATTEMPTS, ENDED
from tests.support.tasks.sandbox_together import (
    LIMITS,
    WALLS,
    allow_all,
    attempts_of,
    backend_of,
    escaped,
)


@pytest.fixture(scope="module", autouse=True)
def needs_a_sandbox():
    try:
        protections()
    except TaskError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fill_in():
    with things_of_the_host() as fill:
        yield fill


@pytest.mark.parametrize("kind", WALLS)
def test_what_reaches_out_is_refused_and_leaves_parent_and_host_as_before(kind, fill_in):
    def state():
        file = Path(fill_in("FILE"))
        return (
            sorted(os.listdir("/proc/self/fd")),
            [resource.getrlimit(n) for n in range(16)],
            (os.getuid(), os.getgid(), os.getcwd(), os.getpriority(os.PRIO_PROCESS, 0)),
            (file.read_text(), stat.S_IMODE(file.stat().st_mode), file.stat().st_mtime_ns),
            sorted(file.parent.iterdir()),
            dict(os.environ),
            {child.pid for child in psutil.Process().children()},  # none is left, not even dead
        )

    backend, before = backend_of(kind), state()
    assert escaped(backend, fill_in) == ""
    assert not processes_of(fill_in("MARK"))
    run_in(backend, ENDED["threads without end"][0], ENDS, seconds=0.4, memory_mb=512)
    assert state() == before


def test_outside_a_sandbox_what_is_tried_is_let(fill_in):
    controls = [name for name in ATTEMPTS if name.startswith("control")]
    program = f"{attempts_of(controls, fill_in)}\nprint(*escapes(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        close_fds=False,
    )
    assert done.stdout.splitlines() == [f"{name}: AssertionError: escaped" for name in controls]


def test_what_is_printed_until_a_kill_takes_effect_is_dropped_and_its_end_is_seen():
    reading, writing = os.pipe()
    much = 3 * process.OUTPUT_AT_MOST

    def print_much():
        with open(writing, "wb") as file:
            file.write(bytes(much))

    printed = bytearray()
    printer = threading.Thread(target=print_much)
    printer.start()
    try:
        assert process._collect(
            {reading: printed}, until=lambda alive: not alive, seconds=20.0, limited=False
        )
    finally:
        os.close(reading)
        printer.join()
    assert process.OUTPUT_AT_MOST < len(printed) < process.OUTPUT_AT_MOST + (1 << 17)


@pytest.mark.parametrize("name", ENDED)
def test_what_does_not_end_well_is_ended(name, fill_in):
    assert gone_wrong(f"ended/{name}", fill_in) == ""


def test_processes_that_a_program_starts_are_gone_with_it(fill_in, monkeypatch):
    """Nothing starts one, because of the filter; without it, they end with their sandbox."""
    monkeypatch.setattr(backends, "syscall_filter", allow_all)
    program = fill_in(
        "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        os.execv('/usr/bin/sleep', ['sleep', 'MARK'])\nos.wait()"
    )
    stop = threading.Event()
    limits = {"seconds": 600.0, "memory_mb": 512, "stop": stop}
    backend = backend_of("bubblewrap")
    thread = threading.Thread(target=run_in, args=[backend, program, ENDS], kwargs=limits)
    thread.start()
    deadline = time.monotonic() + 120
    while len(processes_of(fill_in("MARK"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    there = processes_of(fill_in("MARK"))
    stop.set()
    thread.join()
    assert len(there) == 4
    assert not processes_of(fill_in("MARK"))


def test_output_is_kept_up_to_a_limit_and_comes_from_both_streams():
    verdict = run_alone("import sys\nprint('a', flush=True)\nprint('b', file=sys.stderr)")
    assert verdict == Verdict(passed=True, output="a\nb\n", reason="passed")
    assert run_alone("print('x' * 10 ** 6)").output == "x" * process.OUTPUT_KEPT
    assert run_alone("import os; os.write(1, b'\\xff')").output == "\ufffd"


def test_a_program_may_be_longer_than_a_pipe_holds():
    assert run_alone(f"assert len('{'a' * 200_000}') == 200_000").passed


def test_the_limit_on_memory_is_the_callers():
    program = "x = bytearray(200 << 20)"
    assert run_alone(program, memory_mb=512).passed
    assert run_alone(program, memory_mb=128).reason == "MemoryError"


def test_a_run_that_is_stopped_ends_at_once():
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    verdict = run_untrusted("while True: pass", ENDS, seconds=600, stop=stop)
    timer.join()
    assert (verdict.passed, verdict.reason) == (False, "stopped")


def test_what_begins_after_its_sandbox_was_killed_ends_by_itself():
    """As under bubblewrap's init process, which does not die with it while both are starting."""
    backend = backend_of("bubblewrap")
    interpreter = backend.command[backend.command.index("--") + 1 :]
    late = 'setsid sh -c "sleep 1; exec \\"\\$@\\"" sh "$@"'
    backend = replace(backend, command=("/bin/sh", "-c", late, "sh", *interpreter))
    stop = threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    limits = {"seconds": 600.0, "memory_mb": 512, "stop": stop}
    verdict = run_in(backend, "while True: pass", ENDS, **limits)
    timer.join()
    assert (verdict.passed, verdict.reason) == (False, "stopped")


def test_all_that_a_program_does_shares_its_memory():
    """It needs threads, which a program has under bubblewrap alone."""
    program = (
        "import threading\nkept = []\ndef take():\n    kept.append(bytearray(100 << 20))\n"
        "threads = [threading.Thread(target=take) for _ in range(4)]\n"
        "for t in threads: t.start()\nfor t in threads: t.join()\nassert len(kept) < 4\n"
        "def ends(): pass\n"
    )
    limits = {**LIMITS, "memory_mb": 320}
    assert run_in(backend_of("bubblewrap"), program, ENDS, **limits).passed
