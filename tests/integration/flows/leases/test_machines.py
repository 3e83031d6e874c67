"""One machine, one store: containers and homes leave each other's live builders alone.

A container is a PID namespace, made by unshare as root. What the builders do is in
tests/support/flows/builder_process.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from flows.leases.process import Process
from nanochat_core.runtime.process_start import read_stat
from tests.support.flows.builder_process import bodies, read_until

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
is_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="needs root and unshare, to make PID namespaces",
)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), ()),
        pytest.param(CONTAINER, CONTAINER, marks=is_root),
        pytest.param(CONTAINER, (), marks=is_root),
        pytest.param((), CONTAINER, marks=is_root),
    ],
)
def test_a_live_builder_of_another_home_or_container_keeps_its_lease(toys, builders, first, second):
    builder = builders("one", inside=first)
    read_until(builder, "step")
    waiter = builders("two", inside=second)
    said = read_until(waiter, "waiting")
    time.sleep(1.0)
    assert waiter.poll() is None
    (toys.home.parent / "go").touch()
    ends = [read_until(process, "end")[-1] for process in (builder, waiter)]

    assert "waiting: built by run run-one on host " in said[-1]["text"]
    assert bodies(toys) == ["one"]
    assert [(end["error"], end["cached"]) for end in ends] == [(None, False), (None, True)]


@is_root
def test_a_killed_builder_of_another_container_is_succeeded_when_its_lease_has_run_out(
    toys, builders
):
    killed = builders("one", beat=0.2, inside=CONTAINER)
    read_until(killed, "step")
    killed.send_signal(signal.SIGKILL)  # with all processes of its namespace
    killed.wait()
    (toys.home.parent / "go").touch()
    began = time.monotonic()

    events = read_until(builders("one", ttl=3.0, beat=0.2), "end")  # even in the same home

    assert events[-1]["error"] is None
    assert time.monotonic() - began > 3.0
    assert bodies(toys) == ["one", "one"]


@pytest.mark.parametrize("home", ["one", "two"])
def test_a_killed_builder_of_this_machine_is_succeeded_at_once(toys, builders, home):
    killed = builders("one")
    read_until(killed, "step")
    waiter = builders(home, ttl=1000.0)
    read_until(waiter, "waiting")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (toys.home.parent / "go").touch()

    assert read_until(waiter, "end")[-1]["error"] is None
    assert bodies(toys) == ["one", home]


def test_a_process_is_dead_once_it_has_ended():
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        stat = read_stat(other.pid)
        assert stat is not None
        named = replace(Process.this(), pid=other.pid, start=stat.start)
        assert not named.is_dead()
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert named.is_dead()  # a zombie
    assert named.is_dead()
