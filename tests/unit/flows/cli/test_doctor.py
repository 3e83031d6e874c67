"""Every check of the doctor distinguishes a good machine from a bad one and has a remedy.

What the checks find is a transcript.
"""

import importlib.metadata
import importlib.util
import os
import tomllib
from itertools import chain, islice
from pathlib import Path

import pytest

from flows.cli import checks
from flows.cli.checks import GIB
from infra.prefect.access import AUTH
from infra.prefect.server import Server, write_record
from infra.prefect.supervisor.supervisor import supervising
from nanochat_core.runtime.process_start import this_process
from tasks.base import TaskError
from tasks.sandbox.backends import Backend

TORCH = {"version": "2.13.0", "cuda": None, "bf16_speedup": 3.9, "gpus": [], "gpu_bf16": False}
ROOT = Path(checks.__file__).parents[2]
SHARED = "http://127.0.0.1:9/api"  # no server answers there


@pytest.fixture
def finds(transcript):
    """Compare what checks of this kind find with the transcript."""

    def compare(head, *found):
        lines = [f"{c.state} {c.name}: {c.found}; {c.remedy or 'no remedy'}" for c in found]
        transcript.check(head, "\n".join(lines))
        assert [c for c in found if (c.remedy is None) != (c.state == "ok")] == []

    return compare


def test_packages_that_lack_or_break_at_run_time_are_named(finds):
    def is_missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for package, versions in {
        "sqlalchemy": ("2.0.58", "2.1.0b2"),
        "fastapi": ("0.139.2", "0.150.0", "0.151.0"),
        "whenever": ("0.10.5", "0.11.0"),
        "prefect": ("3.8.8", "3.9.1", "3.10.0"),
    }.items():
        own = [text for text in declared if text.startswith(package)]
        found = [checks.check_packages(own, version_of=lambda _, v=v: v) for v in versions]
        finds(package, *chain(*found))
    finds("missing", *checks.check_packages(declared, version_of=is_missing))


def test_a_checkout_that_is_not_installed_is_named(terminal, monkeypatch, tmp_path, finds):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    monkeypatch.setattr(importlib.metadata, "version", requires)
    found = checks.examine(tmp_path, tmp_path.as_uri())
    finds("doctor", *islice(found, 1, 2))
    found.close()
    terminal.refuses("--version")


def test_missing_optional_packages_are_warnings_with_a_remedy(finds):
    check = checks.check_trackers(("wandb",))
    assert check.state == ("ok" if importlib.util.find_spec("wandb") else "warn")
    finds("trackers", checks.check_trackers(()))
    kernels = (checks.check_kernels(why) for why in ("there is no C++ compiler (g++)", None))
    finds("kernels", *kernels)


def test_torch_and_gpus(finds):
    finds("torch", *checks.check_torch(TORCH | {"bf16_speedup": 0.04}), *checks.check_torch(TORCH))
    two = TORCH | {"gpus": ["H100", "H100"]}
    found = ((TORCH, 2), (TORCH, 0), (two, 2))
    finds("gpu", *(checks.check_gpu(facts, devices=count) for facts, count in found))


def test_room_on_the_disk_and_in_memory(tmp_path, finds):
    home = tmp_path / "not" / "yet"
    sizes = (checks.DISK_WANTED, 5 * GIB, GIB // 2)
    finds("disk", *(checks.check_home(home, free_of=lambda _, s=size: s) for size in sizes))
    (tmp_path / "file").write_text("")
    finds("disk", checks.check_home(tmp_path / "file" / "home"))
    finds("memory", *(checks.check_memory(available * GIB) for available in (8, 4, 1)))
    finds("cpu", *(checks.check_threads(count) for count in (8, 1)))
    assert checks.check_memory(checks.memory_left()).found != "0.0 GiB available"


def test_what_confines_programs_of_a_model(finds, monkeypatch):
    def refuse():
        raise TaskError("no way")

    bubblewrap = Backend(kind="bubblewrap", command=())
    landlock = Backend(kind="landlock", command=(), why=("bwrap not installed",))
    for protections in (lambda: bubblewrap, lambda: landlock, refuse):
        monkeypatch.setattr(checks, "protections", protections)
        finds("sandbox", checks.check_sandbox())


def test_all_that_a_store_must_do_is_tried_and_no_object_is_left(tmp_path, finds):
    found = list(checks.try_store((tmp_path / "store").as_uri()))
    assert (found[0].name, found[-1].name) == ("put", "delete")
    assert {check.state for check in found} == {"ok"}
    files = [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert files == ["swap.lock"]  # of all records of a directory store
    finds("store", *checks.try_store((tmp_path / "not" / "mounted").as_uri()))
    finds("store", *checks.try_store("gs://bucket/x"))


def test_servers_and_workers(tmp_path, finds, monkeypatch):
    monkeypatch.delenv(AUTH, raising=False)
    with monkeypatch.context() as environment:
        environment.setenv("PREFECT_API_URL", SHARED)
        finds("server", *(checks.check_server(tmp_path, shared=url) for url in (None, SHARED)))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    me = this_process()
    write_record(tmp_path, Server(port=9, pid=me.pid, start=me.start))  # it hangs
    finds("server", checks.check_server(tmp_path, shared=None))
    finds("workers", checks.check_workers(tmp_path))
    with supervising(tmp_path):
        assert checks.check_workers(tmp_path).found == f"run by process {os.getpid()}"
