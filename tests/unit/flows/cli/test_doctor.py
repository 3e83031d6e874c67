"""Every check of the doctor distinguishes a good machine from a bad one and has a remedy."""

import importlib.metadata
import importlib.util
import os
import tomllib
from pathlib import Path

import pytest

from flows.cli import checks
from flows.cli.checks import GIB
from infra.prefect.supervisor.supervisor import supervising
from tasks.sandbox.backends import Backend

TORCH = {
    "version": "2.13.0",
    "cuda": None,
    "bf16_speedup": 3.9,
    "gpus": list[str](),
    "gpu_bf16": False,
}
ROOT = Path(checks.__file__).parents[2]


def test_an_old_python_is_refused():
    check = checks.check_python((3, 10, 4))
    assert (check.state, check.remedy) == ("fail", "install Python 3.11 or newer")
    assert checks.check_python((3, 11, 0)).state == "ok"


@pytest.mark.parametrize(
    ("package", "version", "state"),
    [
        ("sqlalchemy", "2.0.58", "ok"),
        ("sqlalchemy", "2.1.0b2", "fail"),
        ("fastapi", "0.139.2", "ok"),
        ("fastapi", "0.150.0", "ok"),
        ("fastapi", "0.151.0", "fail"),
        ("whenever", "0.10.5", "fail"),
        ("whenever", "0.11.0", "ok"),
        ("prefect", "3.8.8", "fail"),
        ("prefect", "3.9.1", "ok"),
        ("prefect", "3.10.0", "fail"),
    ],
)
def test_versions_that_break_at_run_time_are_named(package, version, state):
    check = checks.check_pin(package, version_of=lambda _: version)
    assert check.state == state
    assert version in check.found
    assert (check.remedy is None) == (state == "ok")


def test_a_missing_package_is_named():
    def version_of(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    check = checks.check_pin("prefect", version_of=version_of)
    assert (check.state, check.found) == ("fail", "not installed")


def test_the_pins_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        d.partition("=")[0].partition("[")[0].partition(">")[0]: d for d in project["dependencies"]
    }
    for package, (low, high, _) in checks.PINS.items():
        bounds = declared[package].split("==" if "==" in declared[package] else ">=")[1].split(",<")
        assert checks.version_tuple(bounds[0]) == low
        assert len(bounds) == 1 or checks.version_tuple(bounds[1]) == high


def test_missing_optional_packages_are_warnings_with_a_remedy():
    check = checks.check_trackers(("wandb",))
    assert check.state == ("ok" if importlib.util.find_spec("wandb") else "warn")
    check = checks.check_trackers(())
    assert (check.state, check.remedy) == ("ok", None)
    check = checks.check_kernels("there is no C++ compiler (g++)")
    assert (check.state, check.remedy) == ("warn", "install g++")
    assert checks.check_kernels(None).state == "ok"


def test_bf16_that_does_not_pay_is_a_warning():
    torch, bf16 = checks.check_torch(TORCH | {"bf16_speedup": 0.04})
    assert (torch.state, bf16.state) == ("ok", "warn")
    assert bf16.found == "matrix products run 25.0 times as slow as fp32 on this CPU"
    assert [check.state for check in checks.check_torch(TORCH)] == ["ok", "ok"]


def test_gpus_that_torch_cannot_use_are_a_failure():
    assert checks.check_gpu(TORCH, devices=2).state == "fail"
    assert checks.check_gpu(TORCH, devices=0).state == "ok"
    check = checks.check_gpu(TORCH | {"gpus": ["H100", "H100"]}, devices=2)
    assert (check.state, check.found) == ("ok", "2x H100")


@pytest.mark.parametrize(
    ("free", "state"), [(checks.DISK_WANTED, "ok"), (5 * GIB, "warn"), (GIB // 2, "fail")]
)
def test_disk_space_is_checked_where_home_is(free, state, tmp_path):
    check = checks.check_home(tmp_path / "not" / "yet", free_of=lambda _: free)
    assert check.state == state
    assert str(tmp_path) in check.found


def test_a_home_that_cannot_be_made_is_a_failure(tmp_path):
    (tmp_path / "file").write_text("")
    check = checks.check_home(tmp_path / "file" / "home")
    assert (check.state, check.found) == ("fail", f"{tmp_path}/file/home: not a directory")


@pytest.mark.parametrize(("available", "state"), [(8, "ok"), (4, "warn"), (1, "fail")])
def test_memory_is_checked_by_what_is_available(available, state):
    assert checks.check_memory(available * GIB).state == state


def test_this_machine_has_memory_and_threads():
    assert checks.check_memory(checks.memory_left()).found != "0.0 GiB available"
    assert checks.check_threads(8).state == "ok"
    assert checks.check_threads(1).state == "warn"


def test_what_holds_programs_of_a_model_is_said():
    check = checks.check_sandbox(Backend(kind="bubblewrap", command=()))
    assert (check.state, check.found) == ("ok", "bubblewrap")
    check = checks.check_sandbox(Backend(kind="landlock", command=(), why=("bwrap not installed",)))
    assert (check.state, check.found) == ("warn", "landlock (bwrap not installed)")
    assert check.remedy
    assert checks.check_sandbox("no way").found == "no way"


def test_all_that_a_store_must_do_is_tried_and_no_object_is_left(tmp_path):
    found = list(checks.try_store((tmp_path / "store").as_uri()))
    assert (found[0].name, found[-1].name) == ("put", "delete")
    assert {check.state for check in found} == {"ok"}
    files = [path.name for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert files == ["swap.lock"]  # of all records of a directory store


def test_a_store_that_cannot_be_used_is_a_failure_with_its_remedy(tmp_path):
    [check] = checks.try_store((tmp_path / "not" / "mounted").as_uri())
    assert (check.name, check.state) == ("put", "fail")
    assert "cannot be reached" in check.found
    assert check.remedy
    [check] = checks.try_store("gs://bucket/x")
    assert (check.state, check.found) == ("fail", "unsupported store URL 'gs://bucket/x'")


def test_a_shared_prefect_server_that_does_not_answer_is_a_failure(tmp_path):
    check = checks.check_server(tmp_path, shared="http://127.0.0.1:9/api")
    assert check.state == "fail"
    assert "127.0.0.1:9" in check.found
    assert check.remedy


def test_a_local_prefect_server_need_not_run_yet(tmp_path):
    check = checks.check_server(tmp_path, shared=None)
    assert (check.state, check.found) == ("ok", "not running; `nanochat run` starts one")


def test_workers_are_those_of_a_living_supervisor(tmp_path):
    assert checks.check_workers(tmp_path).found == "not running; `nanochat up` starts them"

    with supervising(tmp_path):
        assert checks.check_workers(tmp_path).found == f"run by process {os.getpid()}"
