import os
import resource
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tasks.base import TaskError
from tasks.sandbox import backends, process
from tasks.sandbox.process import Verdict
from tasks.sandbox.run import protections, run_untrusted
from tests.campaigns.security.sandbox import (
    CHECK,
    ENDS,
    WRONG,
    gone_wrong,
    processes_of,
    run_alone,
    things_of_the_host,
)
from tests.tasks.sandbox_corpus import ATTEMPTS, ENDED
from tests.tasks.sandbox_forgeries import RIGHT

ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)


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


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_reaches_out_of_the_sandbox_is_refused(name, fill_in):
    assert gone_wrong(f"attempt/{name}", fill_in) == ""
    assert not processes_of(fill_in("MARK"))


@pytest.mark.parametrize("name", ENDED)
def test_what_does_not_end_well_is_ended(name, fill_in):
    assert gone_wrong(f"ended/{name}", fill_in) == ""


def test_there_are_enough_attempts():
    assert len(ATTEMPTS) + len(ENDED) >= 160


def test_processes_that_a_program_starts_are_gone_with_it(fill_in, monkeypatch):
    """Nothing starts one, because of the filter; without it, they end with their sandbox."""
    monkeypatch.setattr(backends, "syscall_filter", lambda *_, **__: ALLOW_ALL)
    program = fill_in(
        "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        os.execv('/usr/bin/sleep', ['sleep', 'MARK'])\nos.wait()"
    )
    backend = next(backends.find_backends())
    if isinstance(backend, str):
        pytest.skip(backend)
    stop = threading.Event()
    limits = {"seconds": 60.0, "memory_mb": 512, "stop": stop}
    thread = threading.Thread(target=process.run_in, args=[backend, program, ENDS], kwargs=limits)
    thread.start()
    deadline = time.monotonic() + 30
    while len(processes_of(fill_in("MARK"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    there = processes_of(fill_in("MARK"))
    stop.set()
    thread.join()
    assert len(there) == 4
    assert not processes_of(fill_in("MARK"))


def test_the_parent_and_the_host_are_as_before(fill_in):
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

    before = state()
    for name in [f"attempt/{n}" for n in list(ATTEMPTS)[::4]] + ["ended/threads without end"]:
        gone_wrong(name, fill_in)
    assert state() == before


def test_output_is_kept_up_to_a_limit_and_comes_from_both_streams():
    verdict = run_alone("import sys\nprint('a', flush=True)\nprint('b', file=sys.stderr)")
    assert verdict == Verdict(passed=True, output="a\nb\n", reason="passed")
    assert run_alone("print('x' * 10 ** 6)").output == "x" * process.OUTPUT_KEPT
    assert run_alone("import os; os.write(1, b'\\xff')").output == "\ufffd"


def test_a_program_may_be_longer_than_a_pipe_holds():
    assert run_alone("x = 1\n" * 100_000).passed


def test_a_program_that_is_not_read_costs_no_more_than_its_time():
    program = "#" * 300_000 + "\nimport time; time.sleep(9)"
    assert run_alone(program, seconds=0.5).reason == "timed out after 0.5 s"


def test_the_limit_on_memory_is_the_callers():
    program = "x = bytearray(200 << 20)"
    assert run_alone(program, memory_mb=512).passed
    assert run_alone(program, memory_mb=128).reason == "MemoryError"


def test_runs_beside_each_other_do_not_disturb_each_other():
    programs = [RIGHT, WRONG] * 4
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda program: run_untrusted(program, CHECK), programs))
    assert [verdict.passed for verdict in verdicts] == [True, False] * 4


def test_a_run_that_is_stopped_ends_at_once():
    stop = threading.Event()
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    started = time.monotonic()
    verdict = run_untrusted("while True: pass", ENDS, seconds=600, stop=stop)
    timer.join()
    assert time.monotonic() - started < 60  # of ten minutes; a busy machine takes some seconds
    assert (verdict.passed, verdict.reason) == (False, "stopped")


def test_all_that_a_program_does_shares_its_memory():
    program = (
        "import threading\nkept = []\ndef take():\n    kept.append(bytearray(100 << 20))\n"
        "threads = [threading.Thread(target=take) for _ in range(4)]\n"
        "for t in threads: t.start()\nfor t in threads: t.join()\nassert len(kept) < 4\n"
    )
    assert run_alone(program, memory_mb=320).passed
