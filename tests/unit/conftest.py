"""What a unit test may not do: import torch or Prefect, start a process, listen on a socket.

So `make fast` is done within a minute, and a test that needs more is moved to tests/integration by
its author, not by those who wait for it.
"""

import os
import sys
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from tests.support.leaks import nothing_left_behind

__all__ = ["nothing_left_behind"]

FORBIDDEN = {
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "socket.bind",
    "subprocess.Popen",
}
WATCHED = frozenset({*FORBIDDEN, "import"})
HEAVY = ("prefect", "torch")  # about two CPU seconds each time a process imports one
AFFINITY, FSYNC, START = os.sched_getaffinity, os.fsync, BaseProcess.start

_watching = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: it cannot be taken away again, so it looks whether a unit test runs."""
    if event not in WATCHED or not _watching:
        return
    if event in FORBIDDEN or arguments[0] in HEAVY:
        what = f"{event} {arguments[0]}" if event == "import" else event
        raise AssertionError(f"{what} in a unit test\nhint: move the test to tests/integration")


def _refuse_process(_: BaseProcess) -> None:
    raise AssertionError("a process in a unit test\nhint: move the test to tests/integration")


sys.addaudithook(_refuse)


# These hooks are asked for what lies under this folder alone.
@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Watch what a test file imports."""
    with _Watching():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """Watch the fixtures of a test."""
    with _Watching():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Watch a test."""
    with _Watching():
        return (yield)


class _Watching:
    """The hook refuses what is forbidden while this is open.

    There is one core, as with several stages share their work among processes, and nothing waits
    for a disk: what a power cut leaves is tested elsewhere.
    """

    def __enter__(self) -> None:
        global _watching
        _watching = True
        os.sched_getaffinity = lambda _: {0}
        os.fsync = lambda _: None
        BaseProcess.start = _refuse_process  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        global _watching
        _watching = False
        os.sched_getaffinity = AFFINITY
        os.fsync = FSYNC
        BaseProcess.start = START  # type: ignore[method-assign]
