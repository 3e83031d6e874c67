"""Which runner and precision "auto" takes on a CPU: what fits and was measured the fastest."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from filelock import FileLock

from flows.cli import checks
from nanochat_core.engine.native.build import AMX
from nanochat_core.engine.runners import choose as runners
from nanochat_core.engine.runners import measured
from nanochat_core.engine.runners.choose import choose_runner
from nanochat_core.engine.runners.measured import recorded
from nanochat_core.engine.speed import reduced
from nanochat_core.errors import ConfigError
from nanochat_core.model.gpt import GPT
from nanochat_core.model.shape import head_dim
from nanochat_core.runtime.hardware.cpp_library import processor_flags
from nanochat_core.scaling import model_for_depth, numerics
from tests.support.nanochat_core.engine.native_models import needs_kernels

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "user_cache", lambda: tmp_path)
    return tmp_path / "speeds"


@needs_kernels
def test_auto_takes_the_fastest_side_as_it_was_measured_once(make_model, monkeypatch):
    seconds = {"native in fp32": 2.0, "native in bf16": 3.0, "torch in fp32": 4.0}
    answered = []

    def time_sides(sides, *, answers):
        answered.append(answers)
        return {side: seconds.get(side, 9.0) for side in sides}

    def choice(num_slots=1, **settings):
        found = choose_runner(
            make_model(), num_slots=num_slots, **({"precision": "auto"} | settings)
        )
        return found.runner, found.precision

    monkeypatch.setattr(runners, "time_sides", time_sides)
    assert choice() == ("native", "fp32")
    assert choice(runner="torch") == ("torch", "fp32")
    seconds["native in bf16"] = 1.0
    assert choice() == ("native", "fp32")  # the case of one answer is cached
    assert choice(num_slots=1000) == ("native", "bf16")
    assert answered == [1, 32]
    # A fixed precision, as evaluations and rollouts have, does not depend on a measurement.
    assert choice(num_slots=1000, precision="model") == ("native", "fp32")
    monkeypatch.setattr(runners, "unable", lambda *_, **__: "there is no C++ compiler")
    found = choose_runner(make_model(), num_slots=2, precision="auto")
    assert (found.runner, found.precision) == ("torch", "fp32")
    assert found.reason.startswith("not native: there is no C++ compiler; the fastest measured")


@needs_kernels
def test_all_sides_of_a_cpu_are_timed(make_model):
    threads = torch.get_num_threads()
    choice = choose_runner(make_model(), num_slots=3, precision="auto")
    assert torch.get_num_threads() == threads
    (one, alone), (two, together) = recorded()
    assert (one.answers, two.answers) == (1, 2)  # of 3 the power of two
    sides = {f"{r} in {p}" for r in ("native", "torch") for p in ("bf16", "fp32")}
    if processor_flags() >= AMX:
        sides.add("amx in bf16")
    assert alone.keys() == together.keys() == sides
    means = {side: math.sqrt(alone[side] * together[side]) for side in sides}
    assert min(means, key=means.__getitem__) == f"{choice.runner} in {choice.precision}"
    assert all(
        f"{value / min(means.values()):.2f}x" in choice.reason
        for value in sorted(means.values())[1:]
    )


@needs_kernels
@pytest.mark.parametrize(
    ("bf16", "expected"),  # in memory for all slots, for one in fp32, and for a byte less
    [(1.05, ("fp32", "bf16", "bf16")), (50.0, ("fp32", "fp32", "bf16"))],
    ids=["nearly as fast", "slow"],
)
def test_auto_takes_what_fits_into_the_memory_and_weighs_how_many_answers_do(
    make_model, monkeypatch, bf16, expected
):
    seconds = {"native in fp32": 1.0, "native in bf16": bf16}
    monkeypatch.setattr(
        runners, "time_sides", lambda sides, answers: dict.fromkeys(sides, 99.0) | seconds
    )
    model = make_model()
    for_one = {
        p: choose_runner(model, num_slots=1, precision=p, memory=2**30) for p in ("fp32", "bf16")
    }
    needs = {p: c.weight_bytes + c.pool_bytes for p, c in for_one.items()}
    assert needs["bf16"] < needs["fp32"]
    rotary = 2 * model.config.sequence_len * head_dim(model.config) * 4
    memories = (2**30, needs["fp32"], needs["fp32"] - 1)
    for memory, precision in zip(memories, expected, strict=True):
        found = choose_runner(model, precision="auto", memory=memory + rotary)
        assert (found.runner, found.precision) == ("native", precision)
    one, fewer, most = sorted({case.answers for case, _ in recorded()})
    assert (one, most) == (1, 32)
    assert fewer in (2, 4, 8, 16)
    with pytest.raises(ConfigError, match="are available"):
        choose_runner(model, precision="auto", memory=1000)


def test_a_large_model_is_measured_with_fewer_of_its_layers():
    model = GPT(model_for_depth(12), numerics("fp32"))
    small = reduced(model).config
    assert (small.depth, small.width) == (1, model.config.width)
    assert small.vocab_size == pytest.approx(model.config.vocab_size / 12, abs=1)


# Speeds are cached for what they hold for, and a damaged cache is no error.

SECONDS = {"native in fp32": 0.002, "torch in fp32": 0.005, "native in bf16": 0.001}


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
