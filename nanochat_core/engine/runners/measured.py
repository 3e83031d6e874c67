"""The speeds by which precision "auto" chooses on a CPU, as measured once and then cached.

A measurement (speed.py: `time_sides`) holds for a processor, the versions of torch and of the
kernels, a shape of model and a number of answers; it is a file of the user's cache named after a
hash of these. Whatever finds the file makes the same choice with the same memory. Imports no
torch: `nanochat doctor` lists the files.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock

from nanochat_core.config import ModelConfig
from nanochat_core.engine.native.build import LIBRARY
from nanochat_core.job import write_json
from nanochat_core.runtime.hardware.cpp_library import Unavailable, find_compiler
from nanochat_core.runtime.user_cache import user_cache
from nanochat_core.runtime.versions import processor_name

# That a process waits for another one's measurement, which may build the kernels first.
LOCK_SECONDS = 60.0

Seconds: TypeAlias = Mapping[str, float]  # of the CPU for a decode step, by side


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a measurement holds for."""

    processor: str
    versions: str
    model: str
    sides: str  # what was compared
    answers: int  # at the same time

    def __str__(self) -> str:
        return f"{self.answers} at a time, {self.model}"


def case_of(config: ModelConfig, dtype: str, sides: Iterable[str], *, answers: int) -> Case:
    """Return the case of a model with parameters of `dtype` on this machine."""
    c = config
    return Case(
        processor=processor_name(),
        versions=_versions(),
        # The context's length is left out: a step is timed with a few keys.
        model=f"depth {c.depth}, width {c.width}, heads {c.num_heads}/{c.num_kv_heads}, vocabulary "
        f"{c.vocab_size}, {dtype}",
        sides=", ".join(sides),
        answers=answers,
    )


def recall(case: Case, measure: Callable[[], Seconds]) -> Seconds:
    """Return the cached seconds of a case; `measure` and cache them if there are none."""
    with ExitStack() as held:
        try:
            path = _folder() / f"{hashlib.sha256(repr(case).encode()).hexdigest()[:16]}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            # Of processes that start together one measures for all. If it takes too long, or was
            # stopped (filelock.Timeout, an OSError), the others measure and may choose differently.
            held.enter_context(FileLock(path.with_suffix(".lock"), timeout=LOCK_SECONDS))
            found = _read(path)
        except (OSError, RuntimeError):  # no lock or no cache folder: measured each time
            return measure()
        if found is not None and found[0] == case:
            return found[1]
        seconds = measure()
        with suppress(OSError):
            write_json(path, {"case": asdict(case), "seconds": seconds})
        return seconds


def recorded() -> Iterator[tuple[Case, Seconds]]:
    """Yield the cached measurements that hold on this machine, in the order of their cases."""
    with suppress(OSError, RuntimeError):
        found = [one for path in _folder().glob("*.json") if (one := _read(path)) is not None]
        here = (processor_name(), _versions())
        for case, seconds in sorted(found, key=lambda one: repr(one[0])):
            if (case.processor, case.versions) == here:
                yield case, seconds


def fastest(seconds: Seconds) -> str:
    """Return the side that takes the least time, of two that take the same the first by name."""
    return min(sorted(seconds), key=lambda side: seconds[side])


def describe(seconds: Seconds, best: str) -> str:
    """Return the other sides' times as multiples of the `best` one's, for people."""
    others = sorted(set(seconds) - {best}, key=lambda side: (seconds[side], side))
    return ", ".join(f"{side} takes {seconds[side] / seconds[best]:.2f}x" for side in others)


def _folder() -> Path:
    return user_cache() / "speeds"


def _versions() -> str:
    compiler, kernels = find_compiler(), "none"
    if compiler is not None:
        with suppress(Unavailable):
            kernels = LIBRARY.fingerprint(compiler, LIBRARY.read_sources())
    return f"torch {importlib.metadata.version('torch')}, kernels {kernels}"


def _read(path: Path) -> tuple[Case, Seconds] | None:
    """Return a measurement, or None if there is none or its file is damaged."""
    try:
        tree: Any = json.loads(path.read_bytes())
        seconds = {str(side): float(value) for side, value in tree["seconds"].items()}
        case = Case(**tree["case"])
        return (case, seconds) if set(case.sides.split(", ")) == {*seconds} else None
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
