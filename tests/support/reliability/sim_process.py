"""Simulated machines and the processes on them."""

import zlib

from greenlet import greenlet


class Machine:
    """A host of processes; a boot begins when it starts."""

    __slots__ = ("boot", "host", "id")

    def __init__(self, host: str, *, id: str | None, boot: int) -> None:
        self.host = host
        self.id = id  # of its installation
        self.boot = boot


class Process:
    """A process on some machine: its greenlets live, stop and die together."""

    __slots__ = (
        "alive",
        "boot",
        "cut_off_until",
        "greenlets",
        "home",
        "machine",
        "name",
        "namespace",
        "paused_until",
        "pid",
        "program",
        "skew",
        "start",
        "user",
    )

    def __init__(
        self,
        name: str,
        *,
        home: str,
        skew: float,
        machine: Machine | None = None,
        namespace: int = 0,
        user: int = 0,
    ) -> None:
        self.name = name
        self.home = home
        self.skew = skew  # seconds by which its own clock is ahead
        self.machine = machine or Machine(home, id=home, boot=zlib.crc32(f"{home} {name}".encode()))
        self.boot = self.machine.boot
        self.namespace = namespace  # of pids: 0 is the first one of every machine
        self.user = user
        self.pid = 0  # set when it starts, with its start in ticks
        self.start = 0
        self.program: object = None  # what it runs
        self.alive = True
        self.paused_until = 0.0
        self.cut_off_until = 0.0  # it runs, and nothing that it sends reaches the store
        self.greenlets: list[greenlet] = []

    def again(self, *, namespace: int) -> "Process":
        """Return a process that follows this one in its home."""
        return Process(
            f"{self.name}'",
            home=self.home,
            skew=self.skew,
            machine=self.machine,
            namespace=namespace,
            user=self.user,
        )
