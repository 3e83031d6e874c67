"""A recorded process is found as long as it lives, and no other process is taken for it."""

import os
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from nanochat_core.runtime import process_start
from nanochat_core.runtime.process_start import ProcessRef, find_process, kill, start_of

WAIT = [sys.executable, "-c", "input()"]


@pytest.fixture
def other():
    with subprocess.Popen(WAIT, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def ref(process):
    start = start_of(process.pid)
    return ProcessRef(pid=process.pid, start=start)


def test_a_live_process_is_found_and_an_ended_one_is_not(other):
    recorded = ref(other)
    found = find_process(recorded.pid, recorded.start)
    assert found.pid == other.pid

    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert find_process(recorded.pid, recorded.start) is None
    other.wait()
    assert find_process(recorded.pid, recorded.start) is None
    assert start_of(other.pid) is None


def test_a_start_does_not_depend_on_the_wall_clock(other, monkeypatch):
    before = start_of(other.pid)
    read = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: read(process) + 2.0)
    assert start_of(other.pid) == before


def test_two_processes_and_two_boots_differ(other, monkeypatch):
    before = start_of(other.pid)
    assert before != start_of(os.getpid())
    monkeypatch.setattr(process_start, "boot_id", lambda: "another boot")
    assert start_of(other.pid) != before


def test_only_the_recorded_process_is_killed(other):
    recorded = ref(other)
    assert kill(replace(recorded, start=start_of(os.getpid()) or "")) is False
    assert other.poll() is None

    assert kill(recorded) is True
    assert other.wait() == -signal.SIGKILL
    assert kill(recorded) is False


def test_a_command_with_spaces_and_parentheses_in_its_name_has_a_start():
    code = "open('/proc/self/comm', 'w').write('a) Z (b'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as odd:
        before = start_of(odd.pid)
        odd.stdout.readline()
        assert start_of(odd.pid) == before is not None
        odd.kill()
