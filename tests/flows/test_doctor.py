"""Every check of the doctor tells a good machine from a bad one, and says what to do."""

import importlib.metadata
import json
import stat
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli.app import main
from flows.cli.machine import checks
from flows.cli.machine.checks import GIB
from infra.prefect.records import my_stack, write_record
from infra.storage.base import Store
from tasks.sandbox.run import Protections

TORCH = {
    "version": "2.13.0",
    "cuda": None,
    "bf16_speedup": 3.9,
    "gpus": list[str](),
    "gpu_bf16": False,
}
ROOT = Path(checks.__file__).parents[3]


def test_an_old_python_is_refused() -> None:
    check = checks.check_python((3, 10, 4))
    assert (check.state, check.remedy) == ("fail", "install Python 3.11 or newer")
    assert checks.check_python((3, 11, 0)).state == "ok"


@pytest.mark.parametrize(
    ("package", "version", "state"),
    [
        ("sqlalchemy", "2.0.58", "ok"),
        ("sqlalchemy", "2.1.0b2", "fail"),
        ("fastapi", "0.139.2", "ok"),
        ("fastapi", "0.155.0", "fail"),
        ("prefect", "3.8.8", "ok"),
        ("prefect", "3.9.0", "fail"),
    ],
)
def test_versions_that_break_at_run_time_are_named(package: str, version: str, state: str) -> None:
    check = checks.check_pin(package, version_of=lambda _: version)
    assert check.state == state
    assert version in check.found
    assert (check.remedy is None) == (state == "ok")


def test_a_missing_package_is_named() -> None:
    def version_of(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    check = checks.check_pin("prefect", version_of=version_of)
    assert (check.state, check.found) == ("fail", "not installed")


def test_the_pins_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        d.partition("=")[0].partition("[")[0].partition(">")[0]: d for d in project["dependencies"]
    }
    for package, (low, high, _) in checks.PINS.items():
        bounds = declared[package].split("==" if "==" in declared[package] else ">=")[1].split(",<")
        assert checks.version_tuple(bounds[0]) == low
        assert len(bounds) == 1 or checks.version_tuple(bounds[1]) == high


def test_an_interpreter_without_torch_is_reported_with_its_last_words(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no torch here' >&2\nexit 1\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (check,) = checks.check_torch(checks.ask_torch(str(python)))
    assert (check.state, check.found) == ("fail", "ModuleNotFoundError: no torch here")
    assert check.remedy


def test_bf16_that_does_not_pay_is_a_warning() -> None:
    states = [check.state for check in checks.check_torch(TORCH | {"bf16_speedup": 0.3})]
    assert states == ["ok", "warn"]
    assert [check.state for check in checks.check_torch(TORCH)] == ["ok", "ok"]


def test_gpus_that_torch_cannot_use_are_a_failure() -> None:
    assert checks.check_gpu(TORCH, devices=2).state == "fail"
    assert checks.check_gpu(TORCH, devices=0).state == "ok"
    check = checks.check_gpu(TORCH | {"gpus": ["H100", "H100"]}, devices=2)
    assert (check.state, check.found) == ("ok", "2x H100")


@pytest.mark.parametrize(
    ("free", "state"), [(checks.DISK_WANTED, "ok"), (5 * GIB, "warn"), (GIB // 2, "fail")]
)
def test_disk_space_is_judged_where_home_is(free: int, state: str, tmp_path: Path) -> None:
    check = checks.check_home(tmp_path / "not" / "yet", free_of=lambda _: free)
    assert check.state == state
    assert str(tmp_path) in check.found


def test_a_home_that_cannot_be_made_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = checks.check_home(tmp_path / "file" / "home")
    assert (check.state, check.found) == ("fail", f"{tmp_path}/file/home: not a directory")


@pytest.mark.parametrize(("available", "state"), [(8, "ok"), (4, "warn"), (1, "fail")])
def test_memory_is_judged_by_what_is_available(available: int, state: str) -> None:
    assert checks.check_memory(available * GIB).state == state


def test_this_machine_has_memory_and_threads() -> None:
    assert checks.check_memory(checks.memory_left()).found != "0.0 GiB available"
    assert checks.check_threads(8).state == "ok"
    assert checks.check_threads(1).state == "warn"


def test_what_holds_programs_of_a_model_is_said() -> None:
    check = checks.check_sandbox(Protections(kind="bubblewrap", why=()))
    assert (check.state, check.found) == ("ok", "bubblewrap")
    check = checks.check_sandbox(Protections(kind="landlock", why=("bwrap not installed",)))
    assert (check.state, check.found) == ("warn", "landlock (bwrap not installed)")
    assert check.remedy
    assert checks.check_sandbox("no way").found == "no way"


def test_this_machine_says_what_holds_programs() -> None:
    assert checks.check_sandbox(checks.ask_sandbox()).state in ("ok", "warn")


def test_a_store_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    assert checks.check_store(url).state == "ok"
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_an_unreachable_store_is_a_failure_with_its_remedy(tmp_path: Path) -> None:
    check = checks.check_store((tmp_path / "not" / "mounted").as_uri())
    assert check.state == "fail"
    assert "cannot be reached" in check.found
    assert check.remedy


def test_the_python_of_the_tests_passes_for_one() -> None:
    assert checks.check_python(sys.version_info[:3]).state == "ok"


def test_a_shared_prefect_server_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    check = checks.check_server(tmp_path, shared="http://127.0.0.1:9/api")
    assert check.state == "fail"
    assert "127.0.0.1:9" in check.found
    assert check.remedy


def test_a_local_prefect_server_need_not_run_yet(tmp_path: Path) -> None:
    check = checks.check_server(tmp_path, shared=None)
    assert (check.state, check.found) == ("ok", "not running; `nanochat run` starts one")


def test_workers_are_those_of_a_living_supervisor_and_their_problem_is_a_warning(
    tmp_path: Path,
) -> None:
    assert checks.check_workers(tmp_path).found == "not running; `nanochat up` starts them"

    stack = replace(my_stack(), state="ready", workers={"cpu": 1, "gpu": 2})
    write_record(tmp_path, stack)
    check = checks.check_workers(tmp_path)
    assert (check.state, check.found) == ("ok", "pools cpu, gpu: ready")

    problem = replace(stack, problem="the deployments are missing", hint="do it")
    write_record(tmp_path, problem)
    check = checks.check_workers(tmp_path)
    assert (check.state, check.remedy) == ("warn", "do it")


@pytest.mark.torch
def test_the_command_checks_everything_and_says_by_its_exit_code_whether_a_run_could_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setattr(checks, "DISK_NEEDED", 0)
    words = ["doctor", "--home", str(tmp_path / "home")]

    assert main([*words, "--json"]) == 0
    found = {check["name"]: check["state"] for check in json.loads(capsys.readouterr().out)}
    assert list(found) == [
        *("python", "prefect", "sqlalchemy", "fastapi", "torch", "bf16", "gpu", "cpu"),
        *("memory", "disk", "store", "server", "workers", "sandbox"),
    ]
    assert main([*words, "--store", "file:///not/mounted/store"]) == 1
    said = capsys.readouterr().out
    assert "fail store      store file:///not/mounted/store cannot be reached" in said
    assert "hint: create that directory, or mount the disk it is on" in said


def test_the_store_alone_is_probed_when_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["doctor", "--probe-store", "--home", str(tmp_path / "home")]
    url = (tmp_path / "store").as_uri()
    assert main([*words, "--store", url, "--json"]) == 0
    found = [check["name"] for check in json.loads(capsys.readouterr().out)]
    assert (found[0], found[-1]) == ("put", "delete")
    assert not {"python", "torch", "server"} & set(found)

    assert main([*words, "--store", "file:///not/mounted/store"]) == 1
    said = capsys.readouterr().out
    assert "fail put        store file:///not/mounted/store cannot be reached" in said
    assert "hint: create that directory, or mount the disk it is on" in said

    assert main([*words, "--store", "gs://bucket/x"]) == 1
    said = capsys.readouterr().out
    assert "fail store      unsupported store URL 'gs://bucket/x'" in said


def test_a_bucket_is_checked_like_a_directory(s3_store: Store) -> None:
    assert checks.check_store(s3_store.url).state == "ok"
    assert list(s3_store.list("")) == []
    check = checks.check_store("s3://nowhere-at-all/x")
    assert check.state == "fail"
    assert "there is no bucket 'nowhere-at-all'" in check.found
    assert "s3 mb s3://nowhere-at-all" in (check.remedy or "")
