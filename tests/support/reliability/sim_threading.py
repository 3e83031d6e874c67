"""Threads, events, clocks and names of simulated processes, in place of the system's.

A thread is another greenlet of the same process; waiting and sleeping take virtual time.
"""

from collections.abc import Callable
from pathlib import Path

from greenlet import getcurrent, greenlet

from nanochat_core.runtime.process_start import Stat
from tests.support.reliability.sim_process import Process
from tests.support.reliability.sim_world import World


class _Waiter:
    __slots__ = ("caller", "is_done", "process")

    def __init__(self, process: Process) -> None:
        self.caller: greenlet = getcurrent()
        self.process = process
        self.is_done = False


class _Event:
    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiters: list[_Waiter] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for waiter in self._waiters:
            self._world.at(self._world.now, self._fire, waiter)
        self._waiters.clear()

    def wait(self, timeout: float | None = None) -> bool:
        process = self._world.current()
        if not self._is_set:
            waiter = _Waiter(process)
            self._waiters.append(waiter)
            if timeout is not None:
                self._world.at(self._world.now + timeout, self._fire, waiter)
            self._world.wait(process)
        return self._is_set

    def _fire(self, waiter: _Waiter) -> None:
        if not waiter.is_done:
            waiter.is_done = True
            self._world.wake((waiter.process, waiter.caller, None))


class _Thread:
    def __init__(
        self, world: World, target: Callable[[], None], name: str, daemon: bool = False
    ) -> None:
        self._world = world
        self._target = target
        self._ended = _Event(world)

    def start(self) -> None:
        self._world.spawn(self._world.current(), self._run)

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def _run(self) -> None:
        self._target()
        self._ended.set()


class SimThreading:
    """Stands where a module of the product has `threading`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def Event(self) -> _Event:
        """See threading.Event."""
        return _Event(self._world)

    def Thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> _Thread:
        """See threading.Thread."""
        return _Thread(self._world, target, name, daemon)


class SimTime:
    """Stands where a module of the product has `time`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        """See time.monotonic."""
        return self._world.now

    def time(self) -> float:
        """See time.time; each home's clock is off by up to some minutes."""
        return 1.8e9 + self._world.now + self._world.current().skew

    def sleep(self, seconds: float) -> None:
        """See time.sleep."""
        self._world.sleep(self._world.current(), seconds)


class SimSystem:
    """Stands where flows.leases.process has `os`, `socket` and what it reads of /proc and /etc."""

    def __init__(self, world: World) -> None:
        self._world = world

    def getpid(self) -> int:
        """See os.getpid."""
        return self._world.current().pid

    def kill(self, pid: int, number: int) -> None:
        """See os.kill; `number` is 0."""
        me = self._world.current()
        if (other := self._world.find(me, pid)) is None:
            raise ProcessLookupError
        if other.user != me.user:
            raise PermissionError

    def gethostname(self) -> str:
        """See socket.gethostname."""
        return self._world.current().machine.host

    def read_file(self, path: Path) -> str | None:
        """Return the id of the machine, the only file that is read."""
        return self._world.current().machine.id

    def boot_id(self) -> str:
        """Return the id of the boot."""
        return str(self._world.current().boot)

    def pid_namespace(self) -> str:
        """Return the id of the namespace."""
        return str(self._world.current().namespace)

    def read_stat(self, pid: int) -> Stat | None:
        """Return what /proc shows, which hides the processes of other users."""
        me = self._world.current()
        other = self._world.find(me, pid)
        return Stat("S", other.start) if other and other.user == me.user else None
