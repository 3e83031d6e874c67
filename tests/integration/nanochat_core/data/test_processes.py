import multiprocessing
import os
import subprocess
import sys

import psutil
import pytest

from nanochat_core.data.processes import map_in_processes
from nanochat_core.data.shard_files import row_group_sizes
from nanochat_core.errors import StageError
from nanochat_core.runtime.heartbeat import HEARTBEAT, HeartbeatWriter
from tests.support.flows.waiting import wait_until
from tests.support.nanochat_core.data.fixtures import refused

# The work must be importable in another process, so it is `eval`, `math.sqrt` and the like.
ITEMS = [f"({i} * {i}, __import__('os').getpid())" for i in range(20)]
LARGE = ["b'x' * 32_000_000"] * 20  # more than a pipe holds: a process is sending most of the time


def test_results_come_in_order_from_several_processes():
    results = list(map_in_processes(eval, ITEMS, processes=2))
    assert [result for result, _ in results] == [i * i for i in range(20)]
    assert os.getpid() not in {pid for _, pid in results}
    assert multiprocessing.active_children() == []
    assert {pid for _, pid in map_in_processes(eval, ITEMS, processes=1)} == {os.getpid()}


def test_an_error_arrives_with_its_hint_and_leaves_no_process(tmp_path):
    paths = [tmp_path / f"{i}.parquet" for i in range(4)]
    results = map_in_processes(row_group_sizes, paths, processes=2)
    refused(r"\d\.parquet cannot be read", list, results, hint="make the shards again")
    assert multiprocessing.active_children() == []


def test_a_bug_arrives_with_the_line_where_it_happened():
    with pytest.raises(ZeroDivisionError) as error:
        list(map_in_processes(eval, ["1 // 1", "1 // 0"], processes=2))
    assert "work(item)" in "".join(error.value.__notes__)


def test_results_behind_a_late_one_are_few(tmp_path):
    def item(number):
        """Leaves a file; the first one waits until all that may come are there, and on."""
        leave = f"__import__('pathlib').Path({str(tmp_path)!r}, '{number}').touch()"
        count = f"len(__import__('os').listdir({str(tmp_path)!r}))"
        sleep = "__import__('time').sleep"
        wait = f"any({count} >= 8 or {sleep}(0.01) for _ in range(30_000)), {sleep}(0.3)"
        return f"({leave}, {wait if number == 0 else 0}, {count})[-1]"

    results = map_in_processes(eval, [item(i) for i in range(40)], processes=2)
    assert next(results) == 8  # it and what two processes may do ahead of it
    assert max(results) == 40


def test_what_a_process_does_is_a_sign_of_life_of_its_rank(tmp_path):
    """Its rank is no hang while it reads a long file. Its own beat is the only one by then."""
    heart = "__import__('nanochat_core.runtime.heartbeat', fromlist=['HEARTBEAT'])"
    heartbeats = f"{heart}.read_heartbeats(__import__('pathlib').Path({str(tmp_path)!r}))"
    now = "__import__('time').monotonic()"
    HEARTBEAT.open(tmp_path, 0)
    try:
        item = f"({now}, {heart}.HEARTBEAT.beat('reading'), next({heartbeats}).beat)"
        began, _, beat = next(map_in_processes(eval, [item, item], processes=2))
    finally:
        vars(HEARTBEAT).update(vars(HeartbeatWriter()))  # closed
    assert beat >= began


SUICIDE = ["1", "__import__('os').kill(__import__('os').getpid(), 9)", "2"]


@pytest.mark.timeout(60, method="thread")  # an exception would not end a hang in a `finally`
@pytest.mark.parametrize("items", [SUICIDE, ITEMS, LARGE], ids=["working", "idle", "sending"])
def test_a_process_that_is_killed_is_an_error_and_not_a_wait_for_ever(items):
    def kill_all(result):
        for process in multiprocessing.active_children() if items is not SUICIDE else ():
            process.kill()
            process.join()

    with pytest.raises(StageError, match="a worker process died"):
        list(map(kill_all, map_in_processes(eval, items, processes=2)))
    assert multiprocessing.active_children() == []


@pytest.mark.timeout(60, method="thread")  # an exception would not end a hang in a `finally`
@pytest.mark.parametrize("items", [ITEMS, *[LARGE] * 5])
def test_leaving_early_leaves_no_process(items):
    results = map_in_processes(eval, items, processes=2)
    next(results)
    results.close()
    assert multiprocessing.active_children() == []


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is asked on Linux only")
def test_processes_die_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time\n"
        "from nanochat_core.data.processes import map_in_processes\n"
        "def work(number):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    list(map_in_processes(work, range(2), processes=2))\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    with parent:
        try:
            children = [int(parent.stdout.readline()) for _ in range(2)]
        finally:
            parent.kill()
    wait_until(lambda: not any(map(is_running, children)))
