"""Everything that is tried against the sandbox, under each wall, as an ordinary user.

`run` copies this module and what it imports, all of it standard library, to where that user can
read it, and runs `python -m tests.campaigns.security.sandbox` there once for each wall.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.sandbox import backends, process
from tasks.sandbox.process import Check, Verdict
from tasks.sandbox.run import protections, run_untrusted
from tests.support.tasks.sandbox_corpus import ATTEMPTS, ENDED, LET_WITHOUT_NAMESPACES, REFUSED
from tests.support.tasks.sandbox_forgeries import (
    DECEIVED,
    EXHAUSTING,
    FORGED,
    HONEST,
    NEED_NAMESPACES,
)

TESTS = """
wanted = {(2, 3): 5, (40, 1): 41}
def check(candidate):
    for given, expected in wanted.items():
        assert abs(candidate(*given) - expected) == 0
"""
CHECK = Check(setup="def add(a, b):\n    '''The sum.'''\n", test=TESTS, entry_point="add")
WRONG = "def add(a, b): return 0"
ENDS = Check(setup="", test="def check(ends): ends()", entry_point="ends")
ROOT = Path(__file__).parents[3]
COPIED = ("tasks/**/*.py", "tests/support/tasks/sandbox_*.py", "tests/campaigns/security/*.py")
WALLS = ("bubblewrap", "landlock")
ORDINARY_USER = 65534
NO_SUCH_WALL = 3  # exit status
SECONDS = 0.4  # for what does not end
SECONDS_TO_END = 30.0  # for what ends by itself, on a machine that is busy


@contextlib.contextmanager
def things_of_the_host() -> Iterator[Callable[[str], str]]:
    """Make what programs try to reach; yield what replaces the words in capitals by it."""
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))  # in reach of other users too
    folder.chmod(0o755)
    file = folder / "file"
    file.write_text("of the host")
    file.chmod(0o666)
    opened = os.open(file, os.O_RDONLY)
    # A free number, and inheritable; a fixed one may be of a server of other tests.
    inherited = fcntl.fcntl(opened, fcntl.F_DUPFD, 57)
    os.environ["SANDBOX_SECRET"] = "1"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        objects_of_ipc(folder.name) as objects,
    ):
        unix.bind(f"\0{folder}")
        unix.listen()
        datagrams.bind(str(folder / "datagrams"))
        (folder / "datagrams").chmod(0o666)
        words = {
            "FILE": str(file),
            "HOME": str(Path.home()),
            "TEST": str(os.getpid()),
            "PORT": str(server.getsockname()[1]),
            "SOCKET": str(folder),
            "DGRAM": str(folder / "datagrams"),
            **objects,
            "INHERITED": str(inherited),
            "USER": str(backends.USER if os.geteuid() == 0 else os.geteuid()),
            "MARK": f"3600.{time.time_ns()}",
        }
        pattern = re.compile(rf"\b({'|'.join(words)})\b")
        yield lambda program: pattern.sub(lambda found: words[found[1]], program)
    del os.environ["SANDBOX_SECRET"]
    os.close(opened)
    os.close(inherited)
    shutil.rmtree(folder)


@contextlib.contextmanager
def objects_of_ipc(name: str) -> Iterator[dict[str, str]]:
    """Make a System V segment, semaphore and queue, and a POSIX queue, that anyone may use."""
    libc = ctypes.CDLL(None, use_errno=True)
    shared = libc.shmget(0, 4096, 0o1666)
    semaphores = libc.semget(0, 1, 0o1666)
    queue = libc.msgget(0, 0o1666)
    libc.msgsnd(queue, (ctypes.c_long * 2)(1, 0), 8, 0)
    mask = os.umask(0)
    named = libc.mq_open(f"/{name}".encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    os.umask(mask)
    assert min(shared, semaphores, queue, named) >= 0, os.strerror(ctypes.get_errno())
    try:
        yield {
            "SHARED": str(shared),
            "SEMAPHORES": str(semaphores),
            "QUEUE": str(queue),
            "NAMED": name,
        }
    finally:
        libc.shmctl(shared, 0, None)
        libc.semctl(semaphores, 0, 0)
        libc.msgctl(queue, 0, None)
        libc.mq_unlink(f"/{name}".encode())
        os.close(named)


def processes_of(mark: str) -> list[str]:
    """The processes with a mark in their command, by number."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def run_alone(program: str, *, seconds: float = 5.0, memory_mb: int = 512) -> Verdict:
    """Run a program; "passed" means that it came to its end."""
    return run_untrusted(
        f"{program}\ndef ends(): pass\n", ENDS, seconds=seconds, memory_mb=memory_mb
    )


def gone_wrong(name: str, fill: Callable[[str], str]) -> str:
    """What went wrong with one thing of the corpus, by its name; "" for nothing."""
    kind, _, name = name.partition("/")
    namespaces = protections().kind == "bubblewrap"
    if kind == "attempt":
        if not namespaces and name in LET_WITHOUT_NAMESPACES:
            return ""
        verdict = run_alone(fill(REFUSED + ATTEMPTS[name]), seconds=SECONDS_TO_END)
        return "" if verdict.passed else verdict.reason
    if kind == "ended":
        program, reason = ENDED[name]
        seconds = SECONDS if reason == "timed out" else SECONDS_TO_END
        started = time.monotonic()
        verdict = run_alone(fill(program), seconds=seconds)
        late = time.monotonic() - started > seconds + 5
        right = not verdict.passed and reason in verdict.reason and not late
        small = len(verdict.output) <= process.OUTPUT_KEPT
        return "" if right and small else f"{verdict.reason}{', late' * late}"
    if kind == "forged":
        program = f"{FORGED[name]}\n{WRONG}\n"
        return "passed" if run_untrusted(program, CHECK, seconds=SECONDS_TO_END).passed else ""
    if kind in ("deceived", "exhausting"):
        program = (DECEIVED if kind == "deceived" else EXHAUSTING)[name]
        seconds = SECONDS_TO_END if kind == "deceived" else 1.0
        verdict = run_untrusted(program, CHECK, seconds=seconds)
        slow = kind == "deceived" and verdict.reason.startswith("timed out")
        return "passed" if verdict.passed else "timed out" * slow
    if not namespaces and name in NEED_NAMESPACES:
        return ""
    verdict = run_untrusted(HONEST[name], CHECK, seconds=SECONDS_TO_END)
    return "" if verdict.passed else f"refused: {verdict.reason}"


def names() -> list[str]:
    """Everything there is to try."""
    corpus = {
        "attempt": ATTEMPTS,
        "ended": ENDED,
        "forged": FORGED,
        "deceived": DECEIVED,
        "exhausting": EXHAUSTING,
        "honest": HONEST,
    }
    return [f"{kind}/{name}" for kind, programs in corpus.items() for name in programs]


def run_copy(copy: Path, wall: str, user: int) -> tuple[int, list[str]] | None:
    """Try everything under one wall, as `user` if this is root; None without that wall here.

    Return the number of attempts, and a line for each that got through.
    """
    for path in [p for pattern in COPIED for p in ROOT.glob(pattern)]:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    command = [sys.executable]
    if os.geteuid() == 0 and user != 0:
        who = f"--reuid={user}", f"--regid={user}", "--clear-groups"
        command = ["setpriv", *who, "--", "/usr/bin/python3"]
    subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
    done = subprocess.run(
        [*command, "-B", "-m", __spec__.name, wall], cwd=copy, stdout=subprocess.PIPE, text=True
    )
    if done.returncode == NO_SUCH_WALL:
        return None
    done.check_returncode()
    attempts, through = json.loads(done.stdout)
    return attempts, through


def main() -> int:
    """Try everything under the wall that the command line names; print attempts and faults."""
    wall = sys.argv[1]
    if wall != "bubblewrap":
        os.environ["PATH"] = "/nowhere"  # so that bubblewrap is not found
    if protections().kind != wall:
        return NO_SUCH_WALL
    with things_of_the_host() as fill, ThreadPoolExecutor(2) as pool:
        todo = names()
        wrong = pool.map(lambda name: gone_wrong(name, fill), todo)
        through = [f"{name}: {what}" for name, what in zip(todo, wrong, strict=True) if what]
        through += [f"process {number} is left" for number in processes_of(fill("MARK"))]
    print(json.dumps([len(todo), through]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
