"""The corpus in one run: a program that makes many attempts, one after the other, under one wall.

A run of each alone costs two processes; tests.campaigns.security.sandbox makes those.
"""

import struct
from collections.abc import Callable, Iterable

import pytest

from tasks.sandbox import backends
from tasks.sandbox.backends import Backend
from tasks.sandbox.process import Check, run_in
from tests.support.tasks.sandbox_corpus import ATTEMPTS, LET_WITHOUT_NAMESPACES, REFUSED
from tests.support.tasks.sandbox_forgeries import HONEST, NEED_NAMESPACES

WALLS = {
    "bubblewrap": "no bubblewrap on this machine (Debian: apt-get install bubblewrap)",
    "landlock": "no Landlock in this kernel (Linux 5.13 or newer, booted with lsm=landlock)",
}
LIMITS = {"seconds": 60.0, "memory_mb": 512}

# What an attempt leaves open or in a /tmp of its own is cleared: the next is refused on its merits.
LEFT = ("big", "hole", "link", "mem", *"012345678")
ESCAPES = """
import gc, os
def is_open(fd):
    try: os.fstat(fd)
    except OSError: return False
    return True
def open_files():
    return set(filter(is_open, range(64)))
def clear(before):
    gc.collect()
    for fd in open_files() - before: os.close(fd)
    for name in left:
        try: os.unlink('/tmp/' + name)
        except OSError: pass
    for fd in os.pipe(): os.close(fd)
def escapes():
    found, before = [], open_files()
    for name, source in attempts.items():
        try: exec(source, {'__name__': '__main__'})
        except BaseException as error: found.append(f'{name}: {type(error).__name__}: {error}')
        clear(before)
    return found
"""
NONE_ESCAPES = Check(
    setup="",
    test="def check(escapes):\n    found = escapes()\n    assert found == [], '; '.join(found)",
    entry_point="escapes",
)
ADD = """
places = {}
for name, source in programs.items():
    exec(source, places.setdefault(name, {'__name__': '__main__'}))
def add(name, a, b):
    return places[name]['add'](a, b)
"""


def backend_of(kind: str) -> Backend:
    """Return the wall of this kind. Skips the test where there is none."""
    found = {b.kind: b for b in backends.find_backends() if not isinstance(b, str)}
    if kind not in found:
        pytest.skip(WALLS[kind])
    return found[kind]


def allow_all(machine: str, *, own_files_and_threads: bool) -> bytes:
    """A filter of system calls that lets every call, in place of `syscall_filter`."""
    return struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)


def attempts_of(
    names: Iterable[str], fill: Callable[[str], str], *, left: tuple[str, ...] = ()
) -> str:
    """Return the program that makes these attempts when its `escapes` is called."""
    # Threads stay for some seconds, under a limit on them: what starts many comes last.
    ordered = sorted(names, key=lambda name: "threads" in name)
    attempts = {name: fill(REFUSED + ATTEMPTS[name]) for name in ordered}
    return f"attempts = {attempts!r}\nleft = {left}\n{ESCAPES}"


def escaped(backend: Backend, fill: Callable[[str], str]) -> str:
    """Return which attempts of the corpus get out through a wall; "" for none."""
    namespaces = backend.kind == "bubblewrap"
    names = [name for name in ATTEMPTS if namespaces or name not in LET_WITHOUT_NAMESPACES]
    program = attempts_of(names, fill, left=LEFT if namespaces else ())
    verdict = run_in(backend, program, NONE_ESCAPES, **LIMITS)
    return "" if verdict.passed else verdict.reason


def refused(backend: Backend, names: Iterable[str]) -> str:
    """Return why right programs do not pass through a wall; "" if all do."""
    let = () if backend.kind == "bubblewrap" else NEED_NAMESPACES
    programs = {name: HONEST[name] for name in names if name not in let}
    test = (
        f"def check(add):\n    for name in {list(programs)!r}:\n"
        "        assert add(name, 2, 3) - 5 == 0 and add(name, 40, 1) - 41 == 0, name\n"
    )
    check = Check(setup="", test=test, entry_point="add")
    verdict = run_in(backend, f"programs = {programs!r}\n{ADD}", check, **LIMITS)
    return "" if verdict.passed else verdict.reason
