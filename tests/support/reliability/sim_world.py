"""Simulated time, machines, processes and faults: one seed is one history, the same each time.

Processes are greenlets that run the product's own code. Each operation on the store is a point
where the world switches to another process, in virtual time: a request travels, takes effect at one
moment, its answer travels back. What goes wrong with it is drawn from the seed. What is simulated
and what is not stands in sim_store.py.
"""

import contextlib
import heapq
import random
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from greenlet import getcurrent, greenlet

from infra.storage.base import StoreUnavailable

TIMEOUT = 20.0  # virtual seconds after which a caller gives up an answer
_REPEATED = ("duplicate", "late", "retried")


class Crashed(BaseException):
    """This process is dead: whatever still runs of it reaches nothing outside."""


# How often each thing goes wrong at most, per operation.
HEAVY = {
    "lost request": 0.08,
    "lost answer": 0.12,  # it happened, and the caller does not hear of it
    "retried": 0.12,  # the store's own client asks twice and answers what the second time gave
    "refused": 0.12,  # a passing refusal, perhaps after it happened
    "duplicate": 0.12,  # it arrives twice
    "late": 0.1,  # the second time minutes later
    "slow": 0.15,
    "crash": 0.04,
    "pause": 0.08,
    "stale": 0.5,  # of lists
    "damaged": 0.1,  # of reads
    "cut off": 0.04,  # from then on nothing reaches the store, perhaps for many leases
    "clock set": 0.1,  # the store's wall clock or the process's is set, back or forward
}


def draw_faults(rng: random.Random) -> dict[str, float]:
    """A mixture: each kind is off, rare or frequent, so that kinds meet in all combinations."""
    return {name: most * rng.choice((0, 0, 0.3, 1)) for name, most in HEAVY.items()}


def _thresholds(faults: Mapping[str, float]) -> list[tuple[float, str]]:
    """Return (threshold, fault): the first threshold above a random number is its fault."""
    table: list[tuple[float, str]] = []
    upto = 0.0
    for name, chance in faults.items():
        if name not in ("stale", "damaged", "clock set"):  # which come in addition
            moments = (" before", " after") if name in ("crash", "pause") else ("",)
            for moment in moments:
                upto += chance / len(moments)
                table.append((upto, name + moment))
    assert upto < 1.0, faults
    return table


@dataclass(eq=False)
class Machine:
    """A host of processes; a boot begins when it starts."""

    host: str
    id: str | None  # of its installation
    boot: int


@dataclass(eq=False)
class Process:
    """A process on some machine: its greenlets live, stop and die together."""

    name: str
    home: str
    skew: float  # seconds by which its own clock is ahead
    machine: Machine = None  # type: ignore[assignment]  # None: one of its own
    namespace: int = 0  # of pids: 0 is the first one of every machine
    user: int = 0
    pid: int = field(init=False, default=0)  # set when it starts, with its start in ticks
    start: int = field(init=False, default=0)
    program: object = field(init=False, default=None)  # what it runs
    alive: bool = field(init=False, default=True)
    paused_until: float = field(init=False, default=0.0)
    cut_off_until: float = field(init=False, default=0.0)  # until then nothing reaches the store
    greenlets: list[greenlet] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        own = Machine(self.home, self.home, zlib.crc32(f"{self.home} {self.name}".encode()))
        self.machine = self.machine or own
        self.boot = self.machine.boot


class _Greenlet(greenlet):
    process: Process


@dataclass(eq=False, slots=True)
class Request:
    """One operation on its way."""

    process: Process
    verb: str
    key: str
    data: bytes
    version: str
    fault: str = ""
    caller: Any = field(default_factory=getcurrent)


class World:
    """Virtual time, and the order in which things happen."""

    def __init__(
        self, seed: int, *, faults: Mapping[str, float], trace: list[str] | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.operations = 0
        self.on_death: Callable[[Process], None] = lambda process: None
        self.met: Counter[str] = Counter()  # what happened how often
        self.trace = trace
        self.faulty = True  # until the history is to recover
        self.store_skew = 0.0  # seconds by which the store's wall clock is ahead
        self._faults = faults
        self._table = _thresholds(faults)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._hub = getcurrent()
        self._names = random.Random(~seed)
        self._processes: list[Process] = []

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have `call(*arguments)` happen at `when`."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, partial(call, *arguments)))

    def spawn(self, process: Process, body: Callable[[], None], *, after: float = 0.0) -> None:
        """Start a greenlet of a process. Whatever it raises, but a crash, ends the simulation."""

        def run(_: None) -> None:
            with contextlib.suppress(Crashed):
                body()

        thread = _Greenlet(run, parent=self._hub)
        thread.process = process
        process.greenlets.append(thread)
        if process not in self._processes:
            # The numbers of dead processes are given again, and are the same on all machines.
            live = [self.find(process, pid) for pid in range(1, len(self._processes) + 2)]
            process.pid, process.start = live.index(None) + 1, len(self._processes)
            self._processes.append(process)
        self.at(self.now + after, self.wake, process, thread, None)

    def run(self, until: Callable[[], bool], *, before: float) -> bool:
        """Let time pass until `until` holds; whether it did `before` that moment."""
        events = self._events
        while not until():
            if not events or events[0][0] >= before:
                return False
            self.now, _, call = heapq.heappop(events)
            call()
        return True

    def sleep(self, process: Process, seconds: float) -> None:
        """Resume the calling greenlet after that time, or let it die."""
        self._check_alive(process)
        self.at(self.now + seconds, self.wake, process, getcurrent(), None)
        self.wait(process)

    def wait(self, process: Process) -> Any:
        """The calling greenlet stands still until it is woken; returns what with."""
        self._check_alive(process)
        value = self._hub.switch()
        self._check_alive(process)
        return value

    def current(self) -> Process:
        """Whose code is running."""
        return getcurrent().process

    def find(self, process: Process, pid: int) -> Process | None:
        """Return the live process that has this number where `process` runs."""
        for other in self._processes:
            is_here = (other.boot, other.namespace) == (process.boot, process.namespace)
            if other.alive and is_here and other.pid == pid:
                return other
        return None

    def started_as(self, record: Mapping[str, Any]) -> Process:
        """Return the process that a lease's record names."""
        (found,) = (other for other in self._processes if other.start == record["start"])
        return found

    def reboot(self, machine: Machine) -> None:
        """Kill all processes of a machine; those that follow are of another boot."""
        machine.boot += 1_000_000
        self.met["reboot"] += 1
        for process in self._processes:
            if process.machine is machine:
                self.kill(process)

    def kill(self, process: Process) -> None:
        """SIGKILL: from this moment on nothing that the process does has an effect."""
        if not process.alive:
            return
        process.alive = False
        self.note(process, "is killed")
        for thread in process.greenlets:
            if thread:  # one that has begun has something to unwind
                thread.throw(Crashed)
        self.on_death(process)

    def pause(self, process: Process) -> None:
        """SIGSTOP, and SIGCONT after a while: perhaps much longer than a lease lasts."""
        process.paused_until = self.now + self.rng.choice((10.0, 200.0, 400.0)) * self.rng.random()
        self.note(process, f"is stopped until {process.paused_until:.2f}")

    def cut_off(self, process: Process) -> None:
        """Let nothing that a process sends reach the store, perhaps for many leases."""
        seconds = self.rng.choice((30.0, 300.0, 800.0)) * self.rng.random()
        process.cut_off_until = self.now + seconds
        self.note(process, f"is cut off from the store until {process.cut_off_until:.2f}")

    def set_a_clock(self, process: Process) -> None:
        """Set the wall clock of the store or of a machine, by minutes or by a day."""
        skew = self.rng.choice((200.0, 1000.0, 86400.0)) * self.rng.uniform(-1.0, 1.0)
        self.met["clock set"] += 1
        if self.rng.random() < 0.5:
            self.store_skew = skew
            self.note(process, f"finds the store's clock {skew:.0f} s ahead")
        else:
            process.skew = skew
            self.note(process, f"has its clock set: {skew:.0f} s ahead")

    def close(self) -> None:
        """Unwind whatever still runs. Nothing of it is part of the history."""
        self.trace = None
        self.on_death = lambda process: None
        for process in self._processes:
            self.kill(process)
        self._events.clear()

    def uuid4(self) -> uuid.UUID:
        """In place of uuid.uuid4, so that one seed gives the same names each time."""
        return uuid.UUID(int=self._names.getrandbits(128), version=4)

    def note(self, process: Process, what: str) -> None:
        """A line of the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.2f} {process.name:<12} {what}")

    def ask(self, request: Request, take_effect: Callable[[Request], Any]) -> Any:
        """Send a request and wait for its answer. Called by a process, which may die of it."""
        process = request.process
        self._check_alive(process)
        self.operations += 1
        if self.faulty and self.rng.random() < self._faults.get("clock set", 0.0):
            self.set_a_clock(process)
        request.fault = fault = self._draw(request.verb)
        if fault == "cut off":
            self.cut_off(process)
        if process.cut_off_until > self.now and self.faulty:
            self._lose_answer(request)
        elif fault == "crash before":
            self.at(self.now, self.kill, process)
        elif fault == "lost request":
            self.note(process, f"{request.verb} {request.key} [{fault}]")
            self._lose_answer(request)
        else:
            if fault == "pause before":
                self.pause(process)
            sent = max(self.now, process.paused_until)
            self.at(sent + self._delay(fault), self._arrive, request, take_effect)
        answer = self.wait(process)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _draw(self, verb: str) -> str:
        """What goes wrong with an operation; empty: nothing."""
        if not self.faulty:
            return ""
        r = self.rng.random()
        for threshold, fault in self._table:
            if r < threshold:
                if fault in _REPEATED and verb in ("get", "list"):
                    return ""
                self.met[fault] += 1
                return fault
        r = self.rng.random()
        fault = {"list": "stale", "get": "damaged"}.get(verb, "")
        if r >= self._faults.get(fault, 0.0):
            return ""
        self.met[fault] += 1
        return fault

    def _delay(self, fault: str = "") -> float:
        if fault == "slow":
            return self.rng.uniform(1.0, 0.4 * TIMEOUT)
        return 0.02 + 0.2 * self.rng.random()

    def _lose_answer(self, request: Request) -> None:
        none = StoreUnavailable("the store did not answer")
        self.at(self.now + TIMEOUT, self.wake, request.process, request.caller, none)

    def _arrive(self, request: Request, take_effect: Callable[[Request], Any]) -> None:
        """A request reaches the store: its effect, then its answer."""
        fault, process = request.fault, request.process
        answer = self._effect(request, take_effect)
        if fault == "crash after":
            self.kill(process)
        elif fault == "retried":
            self.at(self.now + self._delay("slow"), self._answer_again, request, take_effect)
        elif fault == "lost answer":
            self._lose_answer(request)
        else:
            if fault == "duplicate":
                self.at(self.now + self._delay(), self._effect, request, take_effect)
            elif fault == "late":
                later = self.now + self.rng.uniform(1.0, 400.0)
                self.at(later, self._effect, request, take_effect)
            elif fault == "pause after":
                self.pause(process)
            self.at(self.now + self._delay(fault), self.wake, process, request.caller, answer)

    def _answer_again(self, request: Request, take_effect: Callable[[Request], Any]) -> None:
        if request.process.alive:
            answer = self._effect(request, take_effect)
            self.wake(request.process, request.caller, answer)

    def _effect(self, request: Request, take_effect: Callable[[Request], Any]) -> Any:
        answer = take_effect(request)
        if self.trace is not None:
            fault = f" [{request.fault}]" if request.fault else ""
            said = repr(answer) if isinstance(answer, bool | Exception) else "done"
            self.note(request.process, f"{request.verb} {request.key} -> {said}{fault}")
        return answer

    def wake(self, process: Process, thread: greenlet, value: Any) -> None:
        """An answer, or the end of a sleep, reaches a process that is neither dead nor stopped."""
        if process.paused_until > self.now:
            self.at(process.paused_until, self.wake, process, thread, value)
        elif process.alive:
            thread.switch(value)

    def _check_alive(self, process: Process) -> None:
        if not process.alive:
            raise Crashed
