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

from tasks.base import TaskError
from tasks.sandbox import backends, landlock, run, seccomp
from tasks.sandbox.process import run_in
from tasks.sandbox.run import protections
from tasks.sandbox.seccomp import CHECKED, OWN_NUMBER, syscall_filter
from tests.campaigns.security import sandbox as campaign
from tests.campaigns.security.sandbox import (
    ENDS,
    gone_wrong,
    names,
    run_alone,
    things_of_the_host,
)
from tests.tasks.sandbox_corpus import ATTEMPTS, REFUSED

LIMITS = {"seconds": 60.0, "memory_mb": 512}


def allow_all(machine, *, own_files_and_threads):
    return struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)


def here():
    """The backends that this machine has."""
    return [backend for backend in backends.find_backends() if not isinstance(backend, str)]


@pytest.fixture
def found_anew():
    run._choose.cache_clear()
    yield
    run._choose.cache_clear()


@pytest.fixture
def no_bubblewrap(tmp_path, monkeypatch, found_anew):
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def no_landlock(monkeypatch, found_anew):
    monkeypatch.setattr(landlock, "landlock_version", lambda: 0)


@pytest.fixture
def forbidden_namespaces(monkeypatch, found_anew):
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
        program = fill(REFUSED + ATTEMPTS[name])
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            capture_output=True,
            text=True,
            close_fds=False,
        )
    assert done.returncode == 1
    assert "AssertionError: escaped" in done.stderr


def test_what_holds_here_is_said_and_why_nothing_stronger():
    found = protections()
    assert (found.kind == "bubblewrap") == (found.why == ())


def test_without_bubblewrap_a_program_walls_itself_in(no_bubblewrap):
    if landlock.landlock_version() == 0:
        pytest.skip("this kernel has no Landlock")
    found = protections()
    assert found.kind == "landlock"
    assert found.why == ("bwrap not installed",)
    with things_of_the_host() as fill:
        tried = [name for name in names() if not name.startswith(("ended", "forged"))]
        wrong = {name: what for name in tried[::2] if (what := gone_wrong(name, fill))}
    assert wrong == {}


def test_where_namespaces_are_forbidden_too(forbidden_namespaces):
    if landlock.landlock_version() == 0:
        pytest.skip("this kernel has no Landlock")
    found = protections()
    assert found.kind == "landlock"
    assert found.why == ("bubblewrap does not start: bwrap: No permissions to create a namespace",)
    assert run_alone("print(1)").output == "1\n"


def test_with_neither_wall_nothing_runs(no_bubblewrap, no_landlock):
    with pytest.raises(TaskError, match=r"does not run here: bwrap.*Landlock is not in this"):
        run_alone("raise SystemExit")


def test_a_wall_that_does_not_hold_is_found_out(no_bubblewrap, found_anew, monkeypatch):
    monkeypatch.setattr(backends, "syscall_filter", allow_all)
    with pytest.raises(TaskError, match="landlock does not hold calls, network, processes"):
        protections()


def test_without_an_interpreter_in_reach_it_is_said(monkeypatch, found_anew):
    monkeypatch.setattr(backends, "_interpreter", lambda as_user: ("/usr/bin/true", ()))
    with pytest.raises(TaskError, match=r"does not run here: .*does not start"):
        protections()


@pytest.mark.slow
@pytest.mark.parametrize("wall", campaign.WALLS)
@pytest.mark.parametrize("user", [0, campaign.ORDINARY_USER])
def test_the_whole_campaign_as_we_are_and_as_another_user(wall, user, tmp_path):
    if os.geteuid() != 0 and user != 0:
        pytest.skip("only root becomes another user")
    with tempfile.TemporaryDirectory(prefix="sandbox-") as copy:
        row = campaign.run_copy(Path(copy), wall, user)
    if row is None:
        pytest.skip(f"there is no {wall} here")
    assert row.got_through == ()


def test_without_the_filter_keys_of_the_session_could_be_read(monkeypatch):
    for way in here():
        monkeypatch.setattr(backends, "syscall_filter", allow_all)
        verdict = run_in(way, REFUSED + ATTEMPTS["control: read keys"], ENDS, **LIMITS)
        assert verdict.reason == "AssertionError: escaped"


def test_another_table_of_calls_is_no_way_around_the_filter():
    program = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.syscall((1 << 30) + 39))"
    assert run_alone(program).output == "-1\n"


def test_a_processor_whose_calls_are_not_known_has_no_filter():
    with pytest.raises(TaskError, match=r"there is none for riscv64 \(only for x86_64, aarch64\)"):
        syscall_filter("riscv64", own_files_and_threads=False)


def test_the_filter_names_its_calls_as_the_kernels_headers_do():
    headers = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h")
    if not all(Path(header).exists() for header in headers):
        pytest.skip("the kernel's headers are not installed")
    for column, header in enumerate(headers):
        text = Path(header).read_text()
        defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
        for name, older in re.findall(r"#define __NR_(\w+) __NR3264_(\w+)", text):
            if older in defined:
                defined.setdefault(name, defined[older])
        for table in (seccomp.ALLOWED, seccomp.OWN_FILES, CHECKED):
            for name, numbers in table.items():
                assert numbers[column] == (int(defined[name]) if name in defined else None), name


@pytest.mark.parametrize("machine", seccomp.MACHINES)
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_filter_is_whole_instructions_and_names_its_process_where_it_has_to(machine, namespaces):
    code = syscall_filter(machine, own_files_and_threads=namespaces)
    operands = [operand for _, _, _, operand in struct.iter_unpack("=HBBI", code)]
    assert len(operands) < 4096  # the kernel's limit
    assert operands.count(OWN_NUMBER) == code.count(OWN_NUMBER.to_bytes(4, "little")) == 7
