"""`nanochat up` and `nanochat down` as a person gives them, and the processes that belong to them.

A process belongs to a home when the home is named in its environment or on its command line: the
programs that `up` starts, what they start, and orphans of theirs.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from infra.prefect.server import find_password
from tests.campaigns.end_to_end.prefect_api import PrefectApi

Kind = Literal["server", "supervisor", "worker", "flow", "stage", "agent", "job", "other"]
_NANOCHAT = (sys.executable, "-m", "flows.cli.app")
_ADDRESS = re.compile(r"http://[\w.]+:\d+")
SECONDS_TO_COME_UP = 400.0  # `up` itself gives a server 240


@dataclass
class Stack:
    """A home, and the environment of the person who works in it."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 4200
    patience: float = 60.0  # seconds for a server that does not answer
    api: PrefectApi = field(init=False)
    _ours: dict[tuple[int, float], bool] = field(default_factory=dict)

    def command(self, *words: str, timeout: float = 300.0) -> str:
        """Give a `nanochat` command; what it prints. Raises AssertionError when it fails."""
        done = subprocess.run(
            [*_NANOCHAT, *words],
            env=self.full_environment,
            cwd=self.home.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"nanochat {words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def full_environment(self) -> dict[str, str]:
        """Ours without anything of Prefect's or the product's, and the person's."""
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "NANOCHAT_"))}
        return {**ours, "NANOCHAT_HOME": str(self.home), "OMP_NUM_THREADS": "1", **self.environment}

    def up(self, *words: str) -> str:
        """`nanochat up`; connects to the server whose address it prints."""
        log = self.home.parent / "up.log"
        with log.open("w") as file:
            # A process of its own, which no command of ours waits for.
            subprocess.run(
                ["setsid", "--fork", *_NANOCHAT, "up", "--port", str(self.port), *words],
                env=self.full_environment,
                cwd=self.home.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                check=True,
            )
        deadline = time.monotonic() + SECONDS_TO_COME_UP
        while "(or Ctrl-C here" not in (said := log.read_text()) and "error: " not in said:
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
        assert "error: " not in said, said
        address = _ADDRESS.search(said)
        assert address is not None, f"no address in: {said}"
        if hasattr(self, "api"):
            self.api.close()
        password = find_password(self.home)
        self.api = PrefectApi(f"{address[0]}/api", password=password, patience=self.patience)
        return said

    def down(self) -> str:
        """`nanochat down`."""
        return self.command("down")

    def end(self) -> None:
        """Leave nothing behind, whatever happened."""
        if hasattr(self, "api"):
            self.api.close()
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.down()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self, *kinds: Kind) -> list[psutil.Process]:
        """Live processes of this home, of the kinds given or of all."""
        found = [p for p in psutil.process_iter() if self._owns(p)]
        return [p for p in found if not kinds or kind_of(p) in kinds]

    def workers(self, pool: str) -> list[psutil.Process]:
        """Prefect workers of a pool."""
        return [p for p in self.processes("worker") if pool in command_line(p)]

    def engines(self, run: str) -> list[psutil.Process]:
        """Processes in which a flow run executes."""
        found = self.processes("flow")
        return [p for p in found if environment_of(p).get("PREFECT__FLOW_RUN_ID") == run]

    def _owns(self, process: psutil.Process) -> bool:
        """Asked once of each process: what one was started with stays."""
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                return False
            key = process.pid, process.create_time()
        except psutil.NoSuchProcess:
            return False
        if key not in self._ours:
            self._ours[key] = self._names_home(process)
        return self._ours[key]

    def _names_home(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            if process.ppid() == os.getpid():
                return False  # a command of ours, which is being given
        here = str(self.home)
        words = (*command_line(process), *environment_of(process).values())
        return any(here in word for word in words)


def kind_of(process: psutil.Process) -> Kind:
    """What part a process plays."""
    words = command_line(process)
    line = " ".join(words)
    kinds: Iterable[tuple[Kind, str]] = (
        ("job", "nanochat_core.worker"),
        ("agent", "infra.launch.agent"),
        ("flow", "prefect.engine"),
        ("worker", "worker start"),
        ("server", "server start"),
        ("supervisor", "flows.cli.app up"),
    )
    for kind, mark in kinds:
        if mark in line and not (kind == "job" and "infra.launch.agent" in line):
            return kind
    return "other"


def command_line(process: psutil.Process) -> list[str]:
    """Its words; none of one that has ended."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    """What it was started with; nothing of one that has ended or is another user's."""
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ()
    return {}


def kill(process: psutil.Process, number: int = signal.SIGKILL) -> bool:
    """Send a signal; whether the process was there."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


def wait_until_gone(stack: Stack, *, seconds: float) -> list[str]:
    """What of the home's processes is left after at most so many seconds, in words."""
    deadline = time.monotonic() + seconds
    while (left := stack.processes()) and time.monotonic() < deadline:
        time.sleep(0.25)
    return [f"{p.pid} {' '.join(command_line(p))[:150]}" for p in left]
