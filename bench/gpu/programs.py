"""A step's program as processes: started, read, stopped for a while, ended with all it began."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from bench.gpu.report import TURN
from nanochat_core.worker import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_END = SECONDS_TO_READ = 5.0  # a killed program, and what it wrote
PEERS = ("NANOCHAT_DIR", "NANOCHAT_JAN_DIR")


class Program:
    """A running program, in a session of its own."""

    def __init__(
        self,
        argv: list[str],
        *,
        dry: bool,
        prepares: bool,
        on_result: Callable[[dict[str, Any]], None],
        on_line: Callable[[str], None],
        on_error: Callable[[str], None],
    ) -> None:
        """Start `argv` after `python`. on_result: of each line of stdout that is a JSON object;
        on_line: of any other; on_error: of each line of stderr."""
        self.is_ready = not prepares
        self.is_held = False
        self._on_result, self._on_line = on_result, on_line
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-gpu-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=ROOT,
            env=environment(self._scratch.name, dry=dry) | ({TURN: "1"} if prepares else {}),
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )
        assert self._process.stdout
        assert self._process.stderr
        self._readers = [
            threading.Thread(target=read, args=(stream, take), daemon=True)
            for stream, take in (
                (self._process.stdout, self._take),
                (self._process.stderr, on_error),
            )
        ]
        for reader in self._readers:
            reader.start()

    def ended(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll()

    def give_turn(self) -> None:
        """Let it begin: all is compiled, and the GPU is its own."""
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it has ended: `ended` says so
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def hold(self) -> None:
        """Stop its processes until `release`."""
        self.is_held = True
        self._send(signal.SIGSTOP)

    def release(self) -> None:
        """Continue its processes."""
        self.is_held = False
        self._send(signal.SIGCONT)

    def close(self) -> None:
        """Kill what still runs, and read the rest of its output."""
        # Also what a program has left behind: it would take the next one's time and memory.
        for _ in range(2):  # again, for what was forked meanwhile
            self._send(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver's call may not return
                self._process.wait(SECONDS_TO_END)
        for reader in self._readers:
            reader.join(SECONDS_TO_READ)
        with contextlib.suppress(OSError):
            assert self._process.stdin
            self._process.stdin.close()
        self._scratch.cleanup()

    def _send(self, number: signal.Signals) -> None:
        for pid in session_of(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _take(self, line: str) -> None:
        row = None
        with contextlib.suppress(ValueError):
            row = json.loads(line)
        if not isinstance(row, dict):
            self._on_line(line)
        elif row == {"ready": True}:
            self.is_ready = True
        else:
            self._on_result(row)


def read(stream: IO[str], take: Callable[[str], None]) -> None:
    """Pass each line of a program's output on until it ends."""
    with stream:
        for line in stream:
            take(line.rstrip())


def session_of(leader: int) -> Iterator[int]:
    """Yield the processes of a session."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name) state parent group session: a name may contain spaces and brackets.
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                yield int(path.parent.name)


def environment(scratch: str, *, dry: bool) -> dict[str, str]:
    """Return a step's environment: the repository and `site` importable, caches shared by steps."""
    paths = [str(ROOT), str(ROOT / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    found["TMPDIR"] = scratch
    for name in PEERS:
        if name in found:
            found[name] = str(Path(found[name]).resolve())
    if dry:
        # The last two as bench/train.py sets them: processes can then be forked from one.
        dry_settings: Mapping[str, str] = {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "GOMP_SPINCOUNT": "1000",
            "TORCHDYNAMO_DISABLE": "1",
        }
        return {**found, **dry_settings}
    caches = Path(tempfile.gettempdir()) / "nanochat-bench-gpu"
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of each of six sides that compile at once
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    return defaults | found
