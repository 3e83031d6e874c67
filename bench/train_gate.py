"""The measuring half of `bench/train.py`, inside the process that trains: ours or the peer's.

A training loop calls `after_step` at the end of each step, and is held there until the driver asks
for more: two loops can take turns on one machine although neither knows of the other. What is
wrapped as a section is timed when the driver asks for it.

After the first step, in which kernels are compiled, it writes a line {"ready": true} to its former
stdout. The driver writes `run STEPS`, `sections STEPS` or `save STEPS` or
`profile STEPS`, a line each, to the process's stdin; each is answered with another line of JSON.
`save` is `sections` with one checkpoint, begun before the first step; the answer to `profile` has
the kernels (bench/gpu/profiles.py). At the end of stdin the process ends.
"""

import functools
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

REST = "other"  # the section of whatever is not wrapped


class Gate:
    """Holds a training loop between rounds, and measures the rounds."""

    def __init__(
        self,
        *,
        synchronize: Callable[[], None],
        peak_bytes: Callable[[], int],
        name: str,
        on_gpu: bool = False,
    ) -> None:
        """`synchronize` waits for the device; `peak_bytes` is its most memory so far."""
        self._on_gpu = on_gpu
        self._synchronize = synchronize
        self._peak_bytes = peak_bytes
        self._name = name
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the loop prints is not an answer
        self._steps = self._left = 0
        self._timed = self._save = False
        self._profiler: Any = None
        self._began = self._cpu_began = self._last = 0.0
        self._current = REST
        self._sections: dict[str, float] = {}

    def after_step(self) -> None:
        """Count a step; after a round's last one, report it and wait for the next round."""
        self._left -= 1
        if self._left > 0:
            return
        if self._steps:
            self._answer()
        else:
            self._synchronize()
            self._write({"ready": True})
        self._next_round()

    def wrap(self, function: Callable[..., Any], section: str) -> Callable[..., Any]:
        """The function, its time counted to a section, its callees' sections left out."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._profiler is not None:
                with self._profiler.section(section):
                    return function(*arguments, **named)
            before = self.switch(section)
            try:
                return function(*arguments, **named)
            finally:
                self.switch(before)

        return timed

    def take_save(self) -> bool:
        """Whether a checkpoint is wanted; once true, false from then on."""
        wanted, self._save = self._save, False
        return wanted

    def switch(self, section: str) -> str:
        """Count the time from here to `section`; returns the section before."""
        before = self._current
        if self._timed:
            self._synchronize()
            now = time.perf_counter()
            self._sections[before] = self._sections.get(before, 0.0) + now - self._last
            self._last = now
        self._current = section
        return before

    def _next_round(self) -> None:
        words = sys.stdin.readline().split()
        if not words:
            os._exit(0)  # the loop has thousands of steps to go
        self._steps = self._left = int(words[1])
        self._timed = words[0] in ("sections", "save")
        self._save = words[0] == "save"
        self._sections = {}
        self._synchronize()
        if words[0] == "profile":
            from bench.gpu.profiles import Profiler

            self._profiler = Profiler(on_gpu=self._on_gpu)
        self._cpu_began = cpu_seconds()
        self._began = self._last = time.perf_counter()

    def _answer(self) -> None:
        self._synchronize()
        seconds = time.perf_counter() - self._began
        self.switch(REST)
        answer = {
            "name": self._name,
            "steps": self._steps,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds() - self._cpu_began,
            "peak_bytes": self._peak_bytes(),
            "sections": self._sections,
        }
        if self._profiler is not None:
            answer["profile"] = self._profiler.stop()
            self._profiler = None
        self._write(answer)

    def _write(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def open_gate(device: str, name: str) -> Gate:
    """The gate of a process that trains on "cpu" or "cuda"."""
    import torch

    if device == "cuda":
        return Gate(
            synchronize=torch.cuda.synchronize,
            peak_bytes=torch.cuda.max_memory_allocated,
            name=name,
            on_gpu=True,
        )
    return Gate(synchronize=lambda: None, peak_bytes=peak_resident, name=name)


def cpu_seconds() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_resident() -> int:
    """The most bytes this process had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
