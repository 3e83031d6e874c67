"""Measured speeds are cached for what they hold for, and a damaged cache is no error."""

import json
from dataclasses import asdict, replace

import pytest
from filelock import FileLock

from flows.cli import checks
from nanochat_core.engine.runners import measured
from nanochat_core.scaling import model_for_depth

SECONDS = {"native in fp32": 0.002, "torch in fp32": 0.005, "native in bf16": 0.001}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nanochat-flows" / "speeds"


def case(answers=1):
    return measured.case_of(model_for_depth(2), "float32", SECONDS, answers=answers)


def refuse():
    raise AssertionError("measured again")


def test_a_case_is_measured_once():
    assert measured.recall(case(), lambda: SECONDS) == SECONDS
    assert measured.recall(case(), refuse) == SECONDS
    for other in (case(answers=2), replace(case(), processor="another")):
        with pytest.raises(AssertionError, match="measured again"):
            measured.recall(other, refuse)


PART = json.dumps({"case": asdict(case()), "seconds": {"native in fp32": 0.002}})


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"case": 1, "seconds": {"a": 1}}', PART])
def test_a_damaged_file_is_measured_again(cache, damage):
    measured.recall(case(), lambda: SECONDS)
    [path] = cache.glob("*.json")
    path.write_text(damage)
    assert list(measured.recorded()) == []
    assert measured.recall(case(), lambda: SECONDS) == SECONDS
    assert json.loads(path.read_text())["seconds"] == SECONDS


def test_without_a_folder_each_choice_measures(cache):
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    assert measured.recall(case(), lambda: SECONDS) == SECONDS
    assert list(measured.recorded()) == []


def test_a_process_that_is_stopped_while_it_measures_is_not_waited_for(cache, monkeypatch):
    measured.recall(case(), lambda: SECONDS)
    [path] = cache.glob("*.json")
    path.unlink()
    monkeypatch.setattr(measured, "LOCK_SECONDS", 0.2)
    with FileLock(path.with_suffix(".lock")):
        assert measured.recall(case(), lambda: SECONDS) == SECONDS
        assert not list(cache.glob("*.json"))  # measured without caching
    measured.recall(case(), lambda: SECONDS)
    assert measured.recall(case(), refuse) == SECONDS


def test_doctor_lists_what_holds_for_this_machine():
    [none] = checks.list_speeds(measured.recorded())
    assert none.found.startswith("not measured yet")
    for one in (case(32), case(1), replace(case(), versions="torch 1.0")):
        measured.recall(one, lambda: SECONDS)
    first, second = checks.list_speeds(measured.recorded())
    assert first.found.startswith("native in bf16 for 1 at a time, depth 2, width 128")
    assert first.found.endswith("native in fp32 takes 2.00x, torch in fp32 takes 5.00x")
    assert second.found.startswith("native in bf16 for 32 at a time")


def test_of_two_equal_sides_the_first_by_name_is_taken():
    assert measured.fastest({"b": 1.0, "a": 1.0, "c": 2.0}) == "a"
