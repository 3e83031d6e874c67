"""Commands of `nanochat` on a home of their own, killed with everything that they started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from nanochat_core.runtime.progress import read_events

CLOCKS = ("tokens_per_second", "seconds", "mfu", "eta_seconds", "dollars")
NANOCHAT = Path(sys.executable).with_name("nanochat")


def kill_tree(process: "subprocess.Popen[bytes]", how: int = signal.SIGKILL) -> None:
    """Send a signal to a process and, if it is SIGKILL, to all that it started; wait for its end.

    A Prefect server is killed too, as far as it is a child.
    """
    root = psutil.Process(process.pid)
    for victim in [*(root.children(recursive=True) if how == signal.SIGKILL else ()), root]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(how)
    process.wait()


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return the live processes that name the directory on their command line, but for this one."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if process.pid != os.getpid() and any(str(directory) in word for word in words):
            found.append(process)
    return found


def values_in(*logs: Path) -> dict[tuple[str, int], list[dict[str, float]]]:
    """Return what each attempt reported by (kind, step), in logs of events, clocks left out."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    # A job that was killed while it started has no such file.
    for event in (event for log in logs if log.exists() for event in read_events(log)):
        if event["kind"] in ("step", "eval"):
            values = {k: v for k, v in event["values"].items() if k not in CLOCKS}
            found.setdefault((event["kind"], event["step"]), []).append(values)
    return found


class Home:
    """A home, and a command that is started in it again and again."""

    def __init__(self, path: Path, *argv: str) -> None:
        self.path = path
        self.argv = argv

    def start(self, argv: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        """Start the command, or another one, in a session of its own."""
        self.path.mkdir(exist_ok=True)
        with (self.path / "console.log").open("ab") as log:
            return subprocess.Popen(
                [NANOCHAT, *(argv or self.argv), "--home", self.path],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def run(self, *argv: str, code: int | None = 0) -> str:
        """Run another command to its end; return what it printed. None: any exit code."""
        done = subprocess.run(
            [NANOCHAT, *argv, "--home", self.path],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def finish(self) -> None:
        """Run the command to its end, then stop the Prefect server too."""
        code = self.start().wait()
        self.run("down")
        assert code == 0, (self.path / "console.log").read_text(encoding="utf-8")[-3000:]

    def kill_after(self, seconds: float, *, working: bool = False) -> str | None:
        """Start the command and kill it all after a while; return what ran, None: it had ended.

        With `working` the seconds count from the first process of a stage on.
        """
        process = self.start()
        while working and process.poll() is None and not self.working():
            time.sleep(0.1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return None
        stages = "+".join(sorted(self.working())) or "between stages"
        kill_tree(process)
        return stages

    def working(self) -> list[str]:
        """Return the stages whose worker is running."""
        lines = [process.cmdline() for process in processes_of(self.path)]
        jobs = [line[-1] for line in lines if "nanochat_core.worker" in line]
        return [Path(job).parent.parent.name for job in jobs]

    def manifests(self) -> dict[str, list[Any]]:
        """Return the manifests of the home's store, each with its directory, by stage."""
        found: dict[str, list[Any]] = {}
        for path in sorted((self.path / "store").glob("*/*/manifest.json")):
            manifest = json.loads(path.read_text(encoding="utf-8"))
            found.setdefault(path.parts[-3], []).append({**manifest, "directory": path.parent})
        return found
