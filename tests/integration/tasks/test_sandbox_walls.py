"""What each wall holds under conditions that the corpus cannot bring about."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tasks.base import TaskError
from tasks.sandbox import backends, landlock, process, run
from tasks.sandbox.process import Check, run_in
from tasks.sandbox.run import protections
from tests.campaigns.security.sandbox import ENDS, run_alone
from tests.support.tasks.sandbox_corpus import REFUSED
from tests.support.tasks.sandbox_together import LIMITS, WALLS, allow_all, backend_of

ROOT = Path(__file__).parents[3]
END = "\ndef ends(): pass\n"
wall = pytest.mark.parametrize("kind", WALLS)


@pytest.fixture
def folder():
    """A folder in which the sandbox's user may do everything."""
    path = Path(tempfile.mkdtemp(prefix="sandbox-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def file(folder):
    path = folder / "file"
    path.write_text("of the host")
    path.chmod(0o666)
    return path


def older_landlock(monkeypatch, version, folder):
    """The wall without bubblewrap as an older kernel has it, with a folder in reach to read."""
    backend_of("landlock")
    if landlock.landlock_version() < version:
        pytest.skip("this kernel's Landlock is older")
    monkeypatch.setattr(landlock, "landlock_version", lambda: version)
    backend = list(backends.find_backends())[-1]
    assert backend.landlock == version
    return replace(backend, readable=(*backend.readable, str(folder)))


TRUNCATE = "os.close(os.open('{file}', os.O_RDONLY | os.O_TRUNC))"


@pytest.mark.parametrize("version", [1, 2, 3, 5])
def test_under_an_older_landlock_files_and_sockets_are_out_of_reach(
    version, monkeypatch, folder, file
):
    way = older_landlock(monkeypatch, version, folder)
    name = f"\0{folder}"
    program = f"""{REFUSED}
assert open('{file}').read(1) == 'o'
refused(lambda: {TRUNCATE.format(file=file)})
refused(lambda: os.truncate('{file}', 0))
refused(lambda: os.truncate(os.open('{file}', 0), 0))
refused(lambda: os.link('{file}', '{file}2'))
refused(lambda: os.rename('{file}', '{file}2'))
refused(lambda: os.kill({os.getpid()}, 0))
a, b = socket.socketpair(type=socket.SOCK_DGRAM)
refused(lambda: a.connect({name!r}))
{END}"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(name)
        assert run_in(way, program, ENDS, **LIMITS).reason == "passed"
    assert file.read_text() == "of the host"
    assert run._find_fault(way) == ""


GRADER = """
import sys
from tasks.sandbox import backends
from tasks.sandbox.process import Check, run_in
backend = [b for b in backends.find_backends() if getattr(b, "kind", "") == {kind!r}][0]
check = Check(setup="", test="", entry_point="f")
program = '''
import ctypes, os, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
os.write(1, b'begun')
time.sleep(600)
'''
run_in(backend, program, check, seconds=600, memory_mb=512)
"""


@wall
def test_a_program_ends_with_a_grader_that_is_killed(kind):
    backend_of(kind)
    with subprocess.Popen([sys.executable, "-c", GRADER.format(kind=kind)], cwd=ROOT) as grader:
        ours = psutil.Process(grader.pid)
        sleeping = {}
        while not sleeping and grader.poll() is None:
            there = ours.children(recursive=True)
            sleeping = {p for p in there if sleeps(p)}
        grader.kill()
    assert there
    _, alive = psutil.wait_procs(there, timeout=60)
    assert alive == []


def sleeps(process):
    """Whether a process has come to its `time.sleep`; what it does before needs other calls."""
    try:
        call = Path(f"/proc/{process.pid}/syscall").read_text().split()[0]
    except (OSError, IndexError):
        return False
    return call in ("230", "115")  # clock_nanosleep


@wall
def test_a_program_whose_grader_is_gone_before_it_starts_does_not_run(kind, folder):
    backend = backend_of(kind)
    (life, life_end), (replies, answer) = os.pipe(), os.pipe()
    order = {"life": life, "replies": answer, "program": "print('ran')"}
    file = process.order_file({**backends.restrictions(backend, seconds=9, memory_mb=512), **order})
    os.close(life_end)  # as when the grader dies
    done = subprocess.run(
        backend.command, stdin=file, capture_output=True, pass_fds=[life, answer], cwd="/", env={}
    )
    os.close(answer)
    assert (done.returncode, done.stdout, done.stderr, os.read(replies, 99)) == (1, b"", b"", b"")
    for fd in (file, life, replies):
        os.close(fd)


def test_a_program_that_gives_its_pipe_away_fails_alone(monkeypatch, folder):
    """The filter refuses that; without it, the others are graded nevertheless."""
    backend = backend_of("landlock")
    monkeypatch.setattr(backends, "syscall_filter", allow_all)
    monkeypatch.setattr(process, "_GONE_AFTER", 5.0)
    monkeypatch.setattr(run, "run_untrusted", lambda *a, **rest: run_in(backend, *a, **rest))
    right = "def add(a, b): return a + b"
    check = Check(setup="", test="def check(add): assert add(1, 2) == 3", entry_point="add")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o666)
        give = (
            "import array, socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
            "what = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [1, 2]))]\n"
            f"a.sendmsg([b'x'], what, 0, '{folder}/socket')\n{right}"
        )
        programs = [right, give, "def add(a, b): return 0", f"x = 1\n{right}"]
        runs = [(program, check) for program in programs]
        verdicts = run.run_all(runs, seconds=60, memory_mb=512)
        assert [verdict.passed for verdict in verdicts] == [True, False, False, True]
        assert verdicts[1].reason == "its pipes are still open 5 s after its processes were killed"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes namespaces of processes")
@pytest.mark.parametrize("number", [1, 2])
def test_bubblewrap_holds_for_a_grader_that_is_among_the_first_processes(number):
    """In a namespace of its own the sandbox has processes of these numbers too."""
    backend_of("bubblewrap")
    ask = "import os; from tasks.sandbox.run import protections; "
    ask += "print(os.getpid(), protections().kind)"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    before = ["sh", "-c", '"$@"; exit $?', "sh"] if number == 2 else []
    done = subprocess.run(
        [*command, *before, sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == f"{number} bubblewrap\n", done.stderr


def test_bubblewrap_holds_where_the_interpreter_lies_below_tmp(monkeypatch, folder, found_anew):
    backend_of("bubblewrap")
    if not Path("/usr/bin/python3").exists():
        pytest.skip("no Python of the system's (Debian: apt-get install python3)")
    assert folder.is_relative_to("/tmp")
    system = Path("/usr/bin/python3").resolve()
    python, library = folder / "bin" / system.name, folder / "lib"
    python.parent.mkdir()
    library.mkdir()
    shutil.copy(system, python)
    (library / system.name).symlink_to(f"/usr/lib/{system.name}")
    where = str(python), (str(python), str(library))
    monkeypatch.setattr(backends, "_interpreter", lambda as_user: where)
    assert protections().kind == "bubblewrap"
    print_it = f"import sys\nprint(sys.executable, sys.prefix){END}"
    verdict = run_in(protections(), print_it, ENDS, **LIMITS)
    assert verdict.output == f"{python} {folder}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes the user")
@pytest.mark.parametrize("change", [process._CHANGE_USER, ("/nowhere",)])
def test_what_root_starts_is_no_roots_with_setpriv_and_without(change, monkeypatch):
    monkeypatch.setattr(process, "_CHANGE_USER", change)
    print_ids = f"import os\nprint(*os.getresuid(), *os.getresgid(), os.getgroups()){END}"
    verdict = run_in(backend_of("landlock"), print_ids, ENDS, **LIMITS)
    assert verdict.output == f"{f'{backends.USER} ' * 6}[]\n"


# Which walls there are on a machine, and what is said of one that does not hold.


@pytest.fixture
def found_anew():
    run.protections.cache_clear()
    yield
    run.protections.cache_clear()


NO_NAMESPACES = "bwrap: No permissions to create a namespace"


def test_what_holds_here_is_said_and_why_nothing_stronger():
    found = protections()
    assert (found.kind == "bubblewrap") == (found.why == ())


@pytest.mark.parametrize(
    ("bwrap", "why"),
    [
        (None, "bwrap not installed"),
        (
            f"#!/bin/sh\necho '{NO_NAMESPACES}' >&2\nexit 1",
            f"bubblewrap does not start: {NO_NAMESPACES}",
        ),
    ],
)
def test_without_bubblewrap_a_program_walls_itself_in(bwrap, why, folder, monkeypatch, found_anew):
    backend_of("landlock")
    monkeypatch.setenv("PATH", str(folder))
    if bwrap:
        (folder / "bwrap").write_text(bwrap)
        (folder / "bwrap").chmod(0o755)
    assert (protections().kind, protections().why) == ("landlock", (why,))
    assert run_alone("print(1)").output == "1\n"


@pytest.mark.parametrize(
    ("module", "name", "value", "complaint"),
    [
        (landlock, "landlock_version", lambda: 0, "bwrap.*Landlock is not in this"),
        (backends, "syscall_filter", allow_all, "does not hold calls, network, processes"),
        (backends, "_interpreter", lambda as_user: ("/usr/bin/true", ()), "does not start"),
    ],
)
def test_where_no_wall_holds_nothing_runs(
    module, name, value, complaint, folder, monkeypatch, found_anew
):
    backend_of("landlock")
    monkeypatch.setenv("PATH", str(folder))  # without bubblewrap
    monkeypatch.setattr(module, name, value)
    with pytest.raises(TaskError, match=f"does not run here: .*{complaint}"):
        run_alone("raise SystemExit")
