"""`pytest --workers N` collects once and forks N workers, which run whole files.

pytest-xdist's workers are new interpreters: each would import torch and collect all tests again.
"""

import gc
import itertools
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest
from _pytest.config import create_terminal_writer

WORKER = "PYTEST_WORKER"  # the environment variable that names a worker in its process


class _Worker:
    """The first process's end of a worker."""

    def __init__(self, name: str, pid: int, connection: Connection) -> None:
        self.name = name
        self.pid = pid
        self.connection = connection
        self.todo: deque[int] = deque()  # tests that it has and has not finished


def run_in_workers(session: pytest.Session, count: int, scope_of: Callable[[str], str]) -> None:
    """Run the tests of `session` in `count` processes; those of one scope run in one process."""
    scopes: dict[str, list[int]] = {}
    for index, item in enumerate(session.items):
        scopes.setdefault(scope_of(item.nodeid), []).append(index)
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # or a worker's first collection would copy all of the memory
    run = _Run(session, deque(scopes.values()))
    try:
        run.start(count)
        while run.workers:
            for connection in wait([*run.workers]):
                run.read(run.workers[connection])  # type: ignore[index]
            if session.shouldfail or session.shouldstop:
                run.stop()
    finally:
        run.end()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


class _Run:
    """The workers, and the files that no worker has yet."""

    def __init__(self, session: pytest.Session, queue: deque[list[int]]) -> None:
        self.session = session
        self.queue = queue
        self.workers: dict[Connection, _Worker] = {}
        self._names = (f"w{number}" for number in itertools.count())

    def start(self, count: int) -> None:
        """Fork at most `count` workers: one a file is enough."""
        for _ in range(min(count, len(self.queue))):
            worker = _fork(self.session, next(self._names), [*self.workers])
            self.workers[worker.connection] = worker

    def read(self, worker: _Worker) -> None:
        """Handle one message, or the end, of a worker."""
        hook = self.session.config.hook
        try:
            event, value = worker.connection.recv()
            if event == "next":
                worker.todo.extend(tests := self.queue.popleft() if self.queue else [])
                worker.connection.send(tests)
        except (EOFError, ConnectionError):
            self._reap(worker)
            return
        if event == "report":
            report = hook.pytest_report_from_serializable(config=self.session.config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif event == "done":
            worker.todo.remove(value)
            item = self.session.items[value]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        elif event == "error":
            raise RuntimeError(f"worker {worker.name} failed:\n{value}")

    def _reap(self, worker: _Worker) -> None:
        """A test in which a worker ends has failed; a new worker runs the rest of its files."""
        del self.workers[worker.connection]
        _, status = os.waitpid(worker.pid, 0)
        if not worker.todo or self.session.shouldfail or self.session.shouldstop:
            return
        item = self.session.items[worker.todo.popleft()]
        code = os.waitstatus_to_exitcode(status)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        text = f"worker {worker.name} ended in this test: {how}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        item.config.hook.pytest_runtest_logreport(report=report)
        if worker.todo:
            self.queue.appendleft([*worker.todo])
            self.start(1)

    def stop(self) -> None:
        """Have all workers end after the test that they run."""
        self.queue.clear()
        for worker in self.workers.values():
            os.kill(worker.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Interrupt the workers that still run."""
        for worker in self.workers.values():
            worker.connection.close()
            os.kill(worker.pid, signal.SIGINT)
            os.waitpid(worker.pid, 0)


def _fork(session: pytest.Session, name: str, others: list[Connection]) -> _Worker:
    ours, theirs = Pipe()
    if pid := os.fork():
        theirs.close()
        return _Worker(name, pid, ours)
    for connection in [ours, *others]:
        connection.close()
    _work(session, name, theirs)


def _work(session: pytest.Session, name: str, connection: Connection) -> NoReturn:
    """Run in a new process what the first one sends, and send its reports."""
    config = session.config
    signal.signal(signal.SIGUSR1, lambda *_: setattr(session, "shouldstop", "stopped"))
    try:
        os.environ[WORKER] = name
        factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / name
        factory._basetemp.mkdir(mode=0o700)
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its file is the first process's
        capture.start_global_capturing()
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(_Terminal(config), "terminalreporter")
        config.pluginmanager.register(_Reports(config, connection))
        for index, after in _assigned(connection):
            item, following = session.items[index], None if after is None else session.items[after]
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(("done", index))
            if session.shouldstop:
                break
        session._setupstate.teardown_exact(None)
    except (KeyboardInterrupt, EOFError, ConnectionError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        session._setupstate.teardown_exact(None)
    except BaseException:  # noqa: BLE001 - of a plugin or a fixture: the first process raises it
        connection.send(("error", traceback.format_exc()))
    finally:
        os._exit(0)  # what the first process left for its own end is not done here


def _assigned(connection: Connection) -> Iterator[tuple[int, int | None]]:
    """Yield each test and the one after it: which fixtures end with a file depends on the next."""

    def ask() -> list[int]:
        connection.send(("next", None))
        return connection.recv()

    tests = ask()
    while tests:
        yield from itertools.pairwise(tests)
        following = ask()
        yield tests[-1], following[0] if following else None
        tests = following


class _Reports:
    """A plugin of a worker: sends the report of each test."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report of a test's setup, call or teardown."""
        config = self._config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._connection.send(("report", data))


class _Terminal:
    """The terminal of a worker: pytest-timeout writes there where a test hangs."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @property
    def _tw(self) -> Any:
        return create_terminal_writer(self._config, sys.stderr)
