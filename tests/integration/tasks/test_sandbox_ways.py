"""Which walls there are on a machine, and what is said of one that does not hold."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from tasks.base import TaskError
from tasks.sandbox import backends, landlock, run
from tasks.sandbox.process import run_in
from tasks.sandbox.run import protections
from tests.campaigns.security.sandbox import ENDS, run_alone
from tests.support.tasks.sandbox_corpus import ATTEMPTS, REFUSED
from tests.support.tasks.sandbox_together import LIMITS, WALLS, allow_all, backend_of


@pytest.fixture
def found_anew():
    run.protections.cache_clear()
    yield
    run.protections.cache_clear()


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


def test_what_holds_here_is_said_and_why_nothing_stronger():
    found = protections()
    assert (found.kind == "bubblewrap") == (found.why == ())


def test_without_bubblewrap_a_program_walls_itself_in(no_bubblewrap):
    backend_of("landlock")
    assert (protections().kind, protections().why) == ("landlock", ("bwrap not installed",))
    assert run_alone("print(1)").output == "1\n"


def test_where_namespaces_are_forbidden_too(forbidden_namespaces):
    backend_of("landlock")
    why = ("bubblewrap does not start: bwrap: No permissions to create a namespace",)
    assert (protections().kind, protections().why) == ("landlock", why)
    assert run_alone("print(1)").output == "1\n"


def test_with_neither_wall_nothing_runs(no_bubblewrap, no_landlock):
    with pytest.raises(TaskError, match=r"does not run here: bwrap.*Landlock is not in this"):
        run_alone("raise SystemExit")


def test_a_wall_that_does_not_hold_is_found_out(no_bubblewrap, monkeypatch):
    backend_of("landlock")
    monkeypatch.setattr(backends, "syscall_filter", allow_all)
    with pytest.raises(TaskError, match="landlock does not hold calls, network, processes"):
        protections()


def test_without_an_interpreter_in_reach_it_is_said(monkeypatch, found_anew):
    monkeypatch.setattr(backends, "_interpreter", lambda as_user: ("/usr/bin/true", ()))
    with pytest.raises(TaskError, match=r"does not run here: .*does not start"):
        protections()


@pytest.mark.parametrize("kind", WALLS)
def test_without_the_filter_keys_of_the_session_could_be_read(kind, monkeypatch):
    backend = backend_of(kind)
    monkeypatch.setattr(backends, "syscall_filter", allow_all)
    verdict = run_in(backend, REFUSED + ATTEMPTS["control: read keys"], ENDS, **LIMITS)
    assert verdict.reason == "AssertionError: escaped"


def test_another_table_of_calls_is_no_way_around_the_filter():
    program = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.syscall((1 << 30) + 39))"
    assert run_alone(program).output == "-1\n"
