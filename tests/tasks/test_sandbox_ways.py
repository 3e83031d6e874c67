import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tasks import sandbox, sandbox_confine, sandbox_syscalls, sandbox_ways
from tasks.base import TaskError
from tasks.sandbox import PROTECTIONS, protections, run_untrusted
from tasks.sandbox_syscalls import syscall_filter
from tests.tasks.sandbox_campaign import gone_wrong, names, things_of_the_host
from tests.tasks.sandbox_corpus import ATTEMPTS, REFUSED

ROOT = Path(__file__).parents[2]
ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)


@pytest.fixture
def found_anew():
    sandbox._choose.cache_clear()
    yield
    sandbox._choose.cache_clear()


@pytest.fixture
def no_bubblewrap(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def no_landlock(monkeypatch, found_anew):
    monkeypatch.setattr(sandbox_confine, "landlock_version", lambda: 0)


@pytest.fixture
def forbidden_namespaces(monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
    folder.chmod(0o755)
    bwrap = folder / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a namespace' >&2\nexit 1")
    bwrap.chmod(bwrap.stat().st_mode | stat.S_IRWXU | 0o055)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    yield
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", [name for name in ATTEMPTS if name.startswith("control")])
def test_outside_a_sandbox_what_is_tried_is_let(name):
    with things_of_the_host() as fill:
        program = REFUSED + fill(ATTEMPTS[name])
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            capture_output=True,
            text=True,
            close_fds=False,
        )
    assert done.returncode == 1
    assert "AssertionError: escaped" in done.stderr


def test_everything_is_held_here_and_tried_out():
    found = protections()
    if found.kind == "limits":
        pytest.skip("neither bubblewrap nor Landlock is here")
    assert (found.held, found.missing) == (tuple(PROTECTIONS), ())
    assert found.kind in ("bubblewrap", "landlock")
    assert (found.kind == "bubblewrap") == (found.why == ())


def test_without_bubblewrap_a_program_walls_itself_in(no_bubblewrap):
    if sandbox_confine.landlock_version() == 0:
        pytest.skip("this kernel has no Landlock")
    found = protections()
    assert (found.kind, found.missing) == ("landlock", ())
    assert re.fullmatch(r"bwrap( and setpriv)? not installed", found.why[0])
    with things_of_the_host() as fill:
        tried = [name for name in names() if not name.startswith(("ended", "forged"))]
        wrong = {name: what for name in tried[::2] if (what := gone_wrong(name, fill))}
    assert wrong == {}


def test_where_namespaces_are_forbidden_too(forbidden_namespaces):
    if sandbox_confine.landlock_version() == 0:
        pytest.skip("this kernel has no Landlock")
    found = protections()
    assert found.kind == "landlock"
    assert found.why == ("bubblewrap does not start: bwrap: No permissions to create a namespace",)
    assert run_untrusted("print(1)").output == "1\n"


def test_with_too_little_left_nothing_runs_unless_one_insists(no_bubblewrap, no_landlock):
    found = protections()
    assert found.kind == "limits"
    assert "files" in found.missing
    assert "limits" in found.held
    with pytest.raises(TaskError, match=r"nothing keeps it from files.*Landlock is not in this"):
        run_untrusted("raise SystemExit")
    with pytest.raises(TaskError, match="nothing keeps it from files"):
        run_untrusted("raise SystemExit", without=[n for n in found.missing if n != "files"])
    assert run_untrusted("print(1)", without=found.missing).output == "1\n"


def test_a_wall_that_does_not_hold_is_found_out(no_bubblewrap, found_anew, monkeypatch):
    monkeypatch.setattr(sandbox_ways, "syscall_filter", lambda machine, alone: ALLOW_ALL)
    missing = protections().missing
    assert {"processes", "calls"} <= set(missing)
    assert {"user", "limits"}.isdisjoint(missing)


def test_without_an_interpreter_in_reach_it_is_said(monkeypatch, found_anew):
    monkeypatch.setattr(sandbox_ways, "_interpreter", lambda as_user: ("/usr/bin/true", ()))
    monkeypatch.setattr(sandbox_ways, "_reads_our_bytecode", lambda python: False)
    with pytest.raises(TaskError, match=r"does not run here: .*does not start"):
        protections()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--without", "bubblewrap"]])
@pytest.mark.parametrize("user", [None, 65534])
def test_the_whole_campaign_as_we_are_and_as_another_user(arguments, user):
    command = [sys.executable]
    if user is not None:
        if os.geteuid() != 0:
            pytest.skip("only root becomes another user")
        who = f"--reuid={user}", f"--regid={user}", "--clear-groups"
        command = ["setpriv", *who, "--", "/usr/bin/python3"]
    with tempfile.TemporaryDirectory(prefix="sandbox-") as copy:
        for path in [*ROOT.glob("tasks/*.py"), *ROOT.glob("tests/tasks/sandbox_*.py")]:
            target = Path(copy) / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
        module = "tests.tasks.sandbox_campaign"
        done = subprocess.run(
            [*command, "-B", "-m", module, *arguments], cwd=copy, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of" in done.stdout


def test_without_the_filter_keys_of_the_session_could_be_read(monkeypatch, found_anew):
    monkeypatch.setattr(sandbox_ways, "syscall_filter", lambda machine, alone=None: ALLOW_ALL)
    verdict = run_untrusted(REFUSED + ATTEMPTS["control: read keys"], without=PROTECTIONS)
    assert verdict.reason == "AssertionError: escaped"


def test_another_table_of_calls_is_no_way_around_the_filter():
    program = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.syscall((1 << 30) + 39))"
    assert run_untrusted(program).output == "-1\n"


def test_a_processor_whose_calls_are_not_known_has_no_filter(monkeypatch, found_anew):
    with pytest.raises(TaskError, match=r"there is none for riscv64 \(only for x86_64, aarch64\)"):
        syscall_filter("riscv64")
    monkeypatch.setattr(sandbox_ways, "MACHINES", {})
    assert set(protections().missing) <= {"network", "processes", "calls"}
    with pytest.raises(TaskError, match=r"nothing keeps it from .*calls"):
        run_untrusted("")


def test_the_filter_names_its_calls_as_the_kernels_headers_do():
    headers = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    if not all(Path(header).exists() for header in headers):
        pytest.skip("the kernel's headers are not installed")
    for column, header in enumerate(headers):
        defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
        for table in (
            sandbox_syscalls.FORBIDDEN,
            sandbox_syscalls.FORBIDDEN_ALONE,
            sandbox_syscalls.OF_ITSELF,
            sandbox_syscalls.OF_ITSELF_OR_0,
            sandbox_syscalls.CHECKED,
        ):
            for name, numbers in table.items():
                assert numbers[column] == (int(defined[name]) if name in defined else None), name


def test_a_filter_is_small_enough_for_the_kernel_and_for_a_pipe():
    for machine in sandbox_syscalls.MACHINES:
        for alone in (None, 77):
            assert len(syscall_filter(machine, alone=alone)) < 4096
