"""What simulated processes have in place of the system's clock, threads, names and /proc."""

from collections.abc import Callable
from pathlib import Path

from greenlet import getcurrent

from nanochat_core.runtime.process_start import Stat
from tests.support.reliability.sim_world import World


class _Event:
    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiters: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for waiter in self._waiters:
            self._world.at(self._world.now, waiter)
        self._waiters.clear()

    def wait(self, timeout: float | None = None) -> bool:
        process, caller = self._world.current(), getcurrent()
        ends: list[float] = []  # the first one counts: the event or the timeout

        def end() -> None:
            ends.append(self._world.now)
            if len(ends) == 1:
                self._world.wake(process, caller, None)

        if not self._is_set:
            self._waiters.append(end)
            if timeout is not None:
                self._world.at(self._world.now + timeout, end)
            self._world.wait(process)
        return self._is_set


class _Thread:
    """Another greenlet of the same process."""

    def __init__(self, world: World, target: Callable[[], None]) -> None:
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


class SimSystem:
    """Stands where modules of the product have `threading`, `time`, `os` and `socket`.

    Waiting and sleeping take virtual time. Also what flows.leases.process reads of /proc and /etc.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def Event(self) -> _Event:
        """See threading.Event."""
        return _Event(self._world)

    def Thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> _Thread:
        """See threading.Thread."""
        return _Thread(self._world, target)

    def monotonic(self) -> float:
        """See time.monotonic."""
        return self._world.now

    def time(self) -> float:
        """See time.time; each home's clock is off by up to some minutes."""
        return 1.8e9 + self._world.now + self._world.current().skew

    def sleep(self, seconds: float) -> None:
        """See time.sleep."""
        self._world.sleep(self._world.current(), seconds)

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
