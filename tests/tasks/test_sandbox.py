import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks import sandbox, sandbox_tools
from tasks.base import TaskError
from tasks.sandbox import Check, run_untrusted
from tasks.sandbox_syscalls import MACHINES, NAMES, syscall_filter
from tests.tasks.sandbox_corpus import ATTEMPTS, DECEIVED, ENDED, FORGED, REFUSED

TESTS = """
wanted = {(2, 3): 5, (40, 1): 41}
def check(candidate):
    for given, expected in wanted.items():
        assert abs(candidate(*given) - expected) == 0
"""
CHECK = Check(setup="def add(a, b):\n    '''The sum.'''\n", test=TESTS, entry_point="add")
WRONG = "def add(a, b): return 0"
RIGHT = "def add(a, b): return a + b"


@pytest.fixture(scope="module", autouse=True)
def needs_a_sandbox():
    try:
        assert run_untrusted("").passed
    except TaskError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def fill_in():
    """Replaces the words in capitals of a program by what they stand for, made for the tests."""
    mark = f"3600.{time.time_ns()}"
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))  # not tmp_path: others cannot enter that
    folder.chmod(0o755)
    file = folder / "file"
    file.write_text("of the host")
    file.chmod(0o666)
    inherited = os.open(file, os.O_RDONLY)
    os.dup2(inherited, 57, inheritable=True)
    os.environ["SANDBOX_SECRET"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"\0{folder}")
        unix.listen()
        words = {
            "FILE": str(file),
            "TEST": str(os.getpid()),
            "PORT": str(server.getsockname()[1]),
            "SOCKET": str(folder),
            "INHERITED": "57",
            "USER": str(sandbox_tools.USER if os.geteuid() == 0 else os.geteuid()),
            "MARK": mark,
        }

        def fill(program):
            for word, value in words.items():
                program = program.replace(word, value)
            return program

        yield fill
    del os.environ["SANDBOX_SECRET"]
    os.close(inherited)
    os.close(57)
    shutil.rmtree(folder)


def processes_of(mark):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_reaches_out_of_the_sandbox_is_refused(name, fill_in):
    verdict = run_untrusted(REFUSED + fill_in(ATTEMPTS[name]))
    assert verdict.passed, verdict
    assert not processes_of(fill_in("MARK"))


@pytest.mark.parametrize("name", [name for name in ATTEMPTS if name.startswith("control")])
def test_outside_the_sandbox_the_same_is_not_refused(name, fill_in):
    program = REFUSED + fill_in(ATTEMPTS[name])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, close_fds=False
    )
    assert done.returncode == 1
    assert "AssertionError: escaped" in done.stderr


@pytest.mark.parametrize("name", ENDED)
def test_what_does_not_end_well_is_ended_and_nothing_is_left(name, fill_in):
    program, reason = ENDED[name]
    started = time.monotonic()
    verdict = run_untrusted(fill_in(program), seconds=0.4)
    assert time.monotonic() - started < 3
    assert not verdict.passed
    assert reason in verdict.reason
    assert verdict.timed_out == (reason == "timed out")
    assert len(verdict.output.encode()) <= sandbox.OUTPUT_KEPT
    assert not processes_of(fill_in("MARK"))


def test_processes_to_be_left_are_there_while_the_program_runs(fill_in):
    program, _ = ENDED["processes that never end"]
    thread = threading.Thread(
        target=run_untrusted, args=[fill_in(program)], kwargs={"seconds": 0.8}
    )
    thread.start()
    time.sleep(0.5)
    assert len(processes_of(fill_in("MARK"))) == 4
    thread.join()
    assert not processes_of(fill_in("MARK"))


@pytest.mark.parametrize("name", FORGED)
def test_a_verdict_cannot_be_made_by_ending_early(name):
    program = f"{FORGED[name]}\n{WRONG}\n"
    alone = run_untrusted(f"{program}{TESTS}\ncheck(add)\n")
    assert not alone.passed
    assert not run_untrusted(program, check=CHECK).passed


@pytest.mark.parametrize("name", DECEIVED)
def test_a_program_that_deceives_its_tests_does_not_deceive_those_outside(name):
    verdict = run_untrusted(DECEIVED[name], check=CHECK)
    assert not verdict.passed, verdict
    assert not verdict.timed_out, verdict


def test_in_one_process_with_its_tests_a_program_deceives_them():
    for name in (
        "equal to everything",
        "take the answer from the test's frame",
        "replace the check",
    ):
        program = f"{DECEIVED[name]}\n{TESTS.replace('abs', '')}\ncheck(add)\n"
        if name == "equal to everything":
            program = program.replace("(candidate(*given) - expected) == 0", "candidate(2, 3) == 9")
        if name == "replace the check":
            program = program.replace("(candidate(*given) - expected)", "abs(9)")
        assert run_untrusted(program).passed, name


@pytest.mark.parametrize(
    "program",
    [
        RIGHT,
        "import operator\nadd = operator.add",
        "class Adder:\n    def __call__(self, a, b): return a + b\nadd = Adder()",
        "add = lambda *numbers: sum(numbers)",
        "def add(a, b):\n    print('adding', a, b)\n    return a + b",
        "import collections, functools, heapq, itertools, math, re, string, typing\n" + RIGHT,
        "if __name__ != '__main__': raise SystemExit\n" + RIGHT,
        "from concurrent.futures import ThreadPoolExecutor\ndef add(a, b):\n"
        "    with ThreadPoolExecutor(3) as pool: return sum(pool.map(int, (a, b)))",
        "import tempfile\ndef add(a, b):\n    with tempfile.TemporaryFile('w+') as f:\n"
        "        f.write(str(a + b)); f.seek(0); return int(f.read())",
        "import random, hashlib, datetime, decimal, json\nrandom.seed(1)\n" + RIGHT,
        "def add(a, b): return float(a + b)",
        "x = [0] * (10 ** 7)\n" + RIGHT,
    ],
)
def test_a_right_program_passes_with_its_tests_and_without_seeing_them(program):
    assert run_untrusted(program, check=CHECK).passed
    assert run_untrusted(f"{program}\n{TESTS}\ncheck(add)").passed


def test_values_cross_as_what_they_are():
    values = (
        "[None, True, 0, -1, 10 ** 50, 0.1, -0.0, 1e308 * 10, 2j, 'caf\\u00e9\\ud800\\n', b'\\xff',"
        " bytearray(b'x'), [], (), {}, set(), frozenset({1}), (1, [2, {3: {4}}]),"
        " {(1, 2): [3], None: {'a': 'dict'}, 'dict': 1}, range(1, 9, 2)]"
    )
    test = f"def check(f):\n    for v in {values}:\n        w = f(v)\n"
    test += "        assert w == v and type(w) is type(v) and repr(w) == repr(v), (v, w)\n"
    test += "        assert repr(f(x=v)) == repr(v)\n        nan = f(float('nan'))\n"
    test += "        assert nan != nan\n"
    verdict = run_untrusted("def f(x): return x", check=Check(setup="", test=test, entry_point="f"))
    assert verdict.passed, verdict


def test_a_test_sees_built_in_exceptions_of_the_program():
    test = (
        "def check(f):\n    try: f(0)\n    except ZeroDivisionError as error: e = error\n"
        "    assert 'division' in str(e)\n"
    )
    check = Check(setup="", test=test, entry_point="f")
    assert run_untrusted("def f(x): return 1 // x", check=check).passed
    assert not run_untrusted("def f(x): return 1", check=check).passed


def test_functions_given_with_the_question_are_there_when_the_program_has_them_too():
    setup = "import math\ndef double(x): return 2 * x\ndef half(x):\n    '''x / 2'''\n"
    test = "def check(f): assert f(double(3)) == 3 and half(2) == 1 and math.pi > 3"
    check = Check(setup=setup, test=test, entry_point="half")
    assert run_untrusted("double = 0\ndef half(x): return x / 2", check=check).passed
    verdict = run_untrusted("def half(x): return x / 2", check=check)
    assert (verdict.passed, verdict.reason) == (False, "NameError: name 'double' is not defined")


def test_output_is_kept_up_to_a_limit_and_comes_from_both_streams():
    verdict = run_untrusted("import sys\nprint('a', flush=True)\nprint('b', file=sys.stderr)")
    assert verdict == sandbox.Verdict(
        passed=True, timed_out=False, output="a\nb\n", reason="passed"
    )
    assert run_untrusted("print('x' * 10 ** 6)").output == "x" * sandbox.OUTPUT_KEPT
    assert run_untrusted("import os; os.write(1, b'\\xff')").output == "\ufffd"


def test_a_program_may_be_longer_than_a_pipe_holds():
    assert run_untrusted("x = 1\n" * 200_000).passed


def test_a_program_that_is_not_read_costs_no_more_than_its_time():
    program = "#" * 300_000 + "\nimport time; time.sleep(9)"
    assert run_untrusted(program, seconds=0.5).reason == "timed out after 0.5 s"


def test_the_limit_on_memory_is_the_callers():
    program = "x = bytearray(200 << 20)"
    assert run_untrusted(program, memory_mb=512).passed
    assert run_untrusted(program, memory_mb=128).reason == "MemoryError"


def test_nothing_runs_without_a_sandbox(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TaskError, match=r"bwrap and prlimit.* are not .*bubblewrap and util-linux"):
        run_untrusted("")
    for name in ("prlimit", "setpriv"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    with pytest.raises(TaskError, match=r"bwrap is not installed \(install bubblewrap\)"):
        run_untrusted("")


def test_nothing_runs_where_namespaces_are_forbidden(tmp_path, monkeypatch):
    forbidden = Path(tempfile.mkdtemp(prefix="sandbox-"))
    forbidden.chmod(0o755)
    try:
        bwrap = forbidden / "bwrap"
        bwrap.write_text(
            "#!/bin/sh\necho 'bwrap: No permissions to create a namespace' >&2\nexit 1"
        )
        bwrap.chmod(bwrap.stat().st_mode | stat.S_IRWXU | 0o055)
        monkeypatch.setenv("PATH", f"{forbidden}:{os.environ['PATH']}")
        with pytest.raises(TaskError, match="none starts here: bwrap: No permissions to create"):
            run_untrusted("")
    finally:
        shutil.rmtree(forbidden)


def test_another_table_of_calls_is_no_way_around_the_filter():
    program = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.syscall((1 << 30) + 39))"
    assert run_untrusted(program).output == "-1\n"


def test_there_is_no_sandbox_on_a_processor_whose_calls_are_not_known():
    with pytest.raises(TaskError, match=r"there is none for riscv64 \(only for x86_64, aarch64\)"):
        syscall_filter("riscv64")


def test_the_filter_names_its_calls_as_the_kernels_headers_do():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    generic = Path("/usr/include/asm-generic/unistd.h")
    if not header.exists() or not generic.exists():
        pytest.skip("the kernel's headers are not installed")
    for path, machine in ((header, "x86_64"), (generic, "aarch64")):
        defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text()))
        numbers = MACHINES[machine]
        assert numbers.forbidden == tuple(int(defined[name]) for name in NAMES)
        assert (numbers.clone, numbers.socket) == (int(defined["clone"]), int(defined["socket"]))


def test_without_the_filter_keys_of_the_session_could_be_read(monkeypatch):
    allow_all = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
    monkeypatch.setattr(sandbox_tools, "syscall_filter", lambda machine: allow_all)
    verdict = run_untrusted(REFUSED + ATTEMPTS["control: read keys"])
    assert verdict.reason == "AssertionError: escaped"


def test_runs_beside_each_other_do_not_disturb_each_other():
    programs = [RIGHT, WRONG] * 4
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda program: run_untrusted(program, check=CHECK), programs))
    assert [verdict.passed for verdict in verdicts] == [True, False] * 4
