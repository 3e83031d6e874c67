"""All that is tried against the sandbox, in one go: `python -m tests.tasks.sandbox_campaign`.

Prints what got through, then a summary; exits with 1 when anything did. With `--without bubblewrap`
the sandbox is made of what is left. It needs nothing but the standard library, so that any user can
run a copy of it.
"""

import argparse
import contextlib
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks import sandbox_runs, sandbox_ways
from tasks.sandbox import Check, protections, run_untrusted
from tests.tasks.sandbox_corpus import ATTEMPTS, ENDED, LET_WITHOUT_NAMESPACES, REFUSED
from tests.tasks.sandbox_forgeries import DECEIVED, EXHAUSTING, FORGED, HONEST, NEED_NAMESPACES

TESTS = """
wanted = {(2, 3): 5, (40, 1): 41}
def check(candidate):
    for given, expected in wanted.items():
        assert abs(candidate(*given) - expected) == 0
"""
CHECK = Check(setup="def add(a, b):\n    '''The sum.'''\n", test=TESTS, entry_point="add")
WRONG = "def add(a, b): return 0"
SECONDS = 0.4  # for what does not end
SECONDS_TO_END = 30.0  # for what ends by itself, on a machine that is busy


@contextlib.contextmanager
def things_of_the_host() -> Iterator[Callable[[str], str]]:
    """Makes what programs try to reach; gives what replaces the words in capitals by it."""
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))  # in reach of other users too
    folder.chmod(0o755)
    file = folder / "file"
    file.write_text("of the host")
    file.chmod(0o666)
    opened = os.open(file, os.O_RDONLY)
    os.dup2(opened, 57, inheritable=True)
    os.environ["SANDBOX_SECRET"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{folder}")
        unix.listen()
        words = {
            "FILE": str(file),
            "HOME": str(Path.home()),
            "TEST": str(os.getpid()),
            "PORT": str(server.getsockname()[1]),
            "SOCKET": str(folder),
            "INHERITED": "57",
            "USER": str(sandbox_ways.USER if os.geteuid() == 0 else os.geteuid()),
            "MARK": f"3600.{time.time_ns()}",
        }
        pattern = re.compile(rf"\b({'|'.join(words)})\b")
        yield lambda program: pattern.sub(lambda found: words[found[1]], program)
    del os.environ["SANDBOX_SECRET"]
    os.close(opened)
    os.close(57)
    shutil.rmtree(folder)


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


def gone_wrong(name: str, fill: Callable[[str], str]) -> str:
    """What went wrong with one thing of the corpus, by its name; "" for nothing."""
    kind, _, name = name.partition("/")
    namespaces = protections().kind == "bubblewrap"
    if kind == "attempt":
        if not namespaces and name in LET_WITHOUT_NAMESPACES:
            return ""
        verdict = run_untrusted(REFUSED + fill(ATTEMPTS[name]), seconds=SECONDS_TO_END)
        return "" if verdict.passed else verdict.reason
    if kind == "ended":
        program, reason = ENDED[name]
        seconds = SECONDS if reason == "timed out" else SECONDS_TO_END
        started = time.monotonic()
        verdict = run_untrusted(fill(program), seconds=seconds)
        late = time.monotonic() - started > seconds + 5
        right = not verdict.passed and reason in verdict.reason and not late
        small = len(verdict.output) <= sandbox_runs.OUTPUT_KEPT
        return "" if right and small else f"{verdict.reason}{', late' * late}"
    if kind == "forged":
        program = f"{FORGED[name]}\n{WRONG}\n"
        verdicts = [
            run_untrusted(f"{program}{TESTS}\ncheck(add)\n", seconds=SECONDS_TO_END),
            run_untrusted(program, check=CHECK, seconds=SECONDS_TO_END),
        ]
        return "passed" if any(verdict.passed for verdict in verdicts) else ""
    if kind in ("deceived", "exhausting"):
        program = (DECEIVED if kind == "deceived" else EXHAUSTING)[name]
        seconds = SECONDS_TO_END if kind == "deceived" else 1.0
        verdict = run_untrusted(program, check=CHECK, seconds=seconds)
        slow = kind == "deceived" and verdict.timed_out
        return "passed" if verdict.passed else "timed out" * slow
    if not namespaces and name in NEED_NAMESPACES:
        return ""
    verdict = run_untrusted(HONEST[name], check=CHECK, seconds=SECONDS_TO_END)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--without", choices=["bubblewrap"], help="what not to use")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.without:
        os.environ["PATH"] = "/nowhere"
    found = protections()
    started = time.monotonic()
    with things_of_the_host() as fill, ThreadPoolExecutor(arguments.workers) as pool:
        todo = names()
        wrong = list(pool.map(lambda name: gone_wrong(name, fill), todo))
        left = processes_of(fill("MARK"))
    for name, what in zip(todo, wrong, strict=True):
        if what:
            print(f"{name}: {what}")  # noqa: T201
    count = sum(map(bool, wrong))
    print(  # noqa: T201
        f"{found.kind}, user {os.geteuid()}: {count} of {len(todo)} went wrong, {len(left)} "
        f"processes left, {time.monotonic() - started:.0f} s; missing: {found.missing or 'nothing'}"
    )
    return 1 if count or left else 0


if __name__ == "__main__":
    sys.exit(main())
