"""Estimates of a plan: from builds of the same kind of work, else measured or from FLOPs."""

import dataclasses
from typing import Any

import pytest

from flows.identity.manifest import Manifest
from flows.identity.work import measure_work
from flows.plan.estimate import MAX_SCALED, MEASURED, estimate
from flows.plan.render import render
from flows.profiles import open_profile
from flows.stages import PRETRAIN, REPORT, SFT, stage_named
from infra.placement import Placement
from nanochat_core import scaling
from nanochat_core.config import RunConfig
from nanochat_core.roofline import named_gpu, pretraining
from tests.support.flows.house import PLACEMENT, RUN, House, on_gpus


def test_a_stage_takes_as_long_as_it_took(full_house):
    run = dataclasses.replace(RUN, rows=dataclasses.replace(RUN.rows, buffer_documents=5))
    estimate = full_house.plan(run, placement=PLACEMENT).of("rows").estimate
    assert estimate.seconds == 100
    assert estimate.dollars == pytest.approx(0.1)
    assert estimate.source == "last time"
    assert full_house.plan(run).of("rows").estimate is None


def test_pretraining_is_scaled_by_its_flops(built):
    manifest = built.plan().of("pretrain").manifest
    steps = RUN.pretrain.num_steps * 2
    run = dataclasses.replace(RUN, pretrain=dataclasses.replace(RUN.pretrain, num_steps=steps))
    estimate = built.plan(run, placement=PLACEMENT).of("pretrain").estimate
    assert estimate.seconds == pytest.approx(200)
    assert manifest.name in estimate.source


def test_other_text_and_other_questions_take_another_time(full_house):
    shards = dataclasses.replace(RUN.shards, source="local", path="/x")
    evaluation = dataclasses.replace(RUN.chat_eval, tasks=RUN.chat_eval.tasks[:1])
    run = dataclasses.replace(RUN, shards=shards, chat_eval=evaluation)
    plan = full_house.plan(run, placement=PLACEMENT)
    assert [plan.of(n).estimate for n in ("shards", "tokens", "chat_eval_sft")] == [None] * 3
    assert plan.of("sft").estimate is not None  # its conversations are the same
    assert "; the rest take " in render(plan)[-1]
    unknown = sum(i.estimate is None and i.state != "=" for i in plan.stages)
    assert f"; {unknown} of " in render(plan)[-1]


def test_a_first_plan_on_a_cpu_says_what_the_smallest_profile_took(house):
    run = open_profile("tiny").run
    plan = house.plan(run, placement=PLACEMENT)
    found = {i.stage.name: i.estimate for i in plan.stages if i.estimate is not None}
    assert {name: e.seconds for name, e in found.items()} == MEASURED
    assert {e.source for e in found.values()} == {"as measured on one core"}
    assert set(MEASURED) == {stage.name for stage in (*REPORT.inputs, REPORT)}
    assert "; about " in render(plan)[-1]
    longer = dataclasses.replace(run.sft, num_epochs=2 * run.sft.num_epochs)
    twice = house.plan(dataclasses.replace(run, sft=longer), placement=PLACEMENT)
    assert twice.of("sft").estimate is None  # not the smallest profile


def test_without_history_only_pretraining_of_a_large_model_has_an_estimate(house):
    large = scaling.run_for_depth(4)
    plan = house.plan(large, placement=PLACEMENT)
    estimates = {i.stage.name: i.estimate for i in plan.stages if i.estimate is not None}
    assert set(estimates) == {"pretrain", "report"}
    assert estimates["pretrain"].source == "no GPU: a guess, 30 GFLOP/s a thread"
    gpu = on_gpus(8, dollars_per_hour=0.0)
    faster = house.plan(large, placement=gpu).of("pretrain").estimate
    assert faster.source == "if H100s, at 30% MFU by the roofline, $3.99 an hour each in 2026-11"
    assert faster.seconds < estimates["pretrain"].seconds
    assert faster.dollars == pytest.approx(faster.seconds / 3600 * 8 * 3.99)
    two = house.plan(large, placement=dataclasses.replace(gpu, nodes=2)).of("pretrain").estimate
    assert (two.seconds, two.dollars) == pytest.approx((faster.seconds / 2, faster.dollars))


def test_the_gpu_of_this_machine_is_what_pretraining_is_estimated_for(house, monkeypatch):
    gpu = on_gpus(8, dollars_per_hour=0.0)
    assumed = house.plan(placement=gpu).of("pretrain").estimate
    monkeypatch.setattr("flows.plan.estimate.gpu_name", lambda: "NVIDIA L40S")
    known = house.plan(placement=gpu).of("pretrain").estimate
    pooled = dataclasses.replace(gpu, pool="gpu")  # another machine's GPUs
    assert house.plan(placement=pooled).of("pretrain").estimate == assumed
    assert known.source == "8 x NVIDIA L40S, at 25% MFU by the roofline"
    assert (known.dollars, known.on_gpus) == (0, True)  # no price is known
    pace = pretraining(RUN, named_gpu("l40s"), "bf16")
    assert known.seconds == pytest.approx(pace.gpu_seconds / 8)
    assert known.seconds > assumed.seconds
    monkeypatch.setattr("flows.plan.estimate.gpu_name", lambda: "NVIDIA A100-SXM4-80GB")
    in_fp8 = dataclasses.replace(RUN, numerics=dataclasses.replace(RUN.numerics, precision="fp8"))
    assert house.plan(in_fp8, placement=gpu).of("pretrain").estimate is None  # it has none


def test_a_machine_that_would_take_months_is_named_and_has_no_price(house):
    gpu = on_gpus(8, dollars_per_hour=0.0)
    assert "warning" not in str(render(house.plan(placement=gpu)))
    lines = render(house.plan(scaling.run_for_depth(24), placement=PLACEMENT), name="speedrun")
    said = "warning: this machine cannot train speedrun: pretrain would take about 22 years"
    assert lines[-1].startswith(said)
    assert "--pool" in lines[-1]


def test_a_build_with_other_threads_or_on_another_gpu_is_passed_over(built, monkeypatch):
    manifest = built.plan().of("sft").manifest
    assert manifest is not None

    def found(placement: Placement, device: str, metrics: dict[str, Any], **segment: Any) -> bool:
        segments = ({"started": 0.0, "ended": 100.0, "device": device, **segment},)
        made = dataclasses.replace(manifest.provenance, segments=segments, metrics=metrics)
        history = [dataclasses.replace(manifest, provenance=made)]
        return estimate(stage_named("sft"), RUN, history, placement) is not None

    threads = PLACEMENT.resources.threads
    assert found(PLACEMENT, "cpu", {}, threads=threads)
    assert not found(PLACEMENT, "cpu", {}, threads=threads + 1)
    monkeypatch.setattr("flows.plan.estimate.gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    assert found(on_gpus(1), "cuda", {"device": "NVIDIA H100 80GB HBM3"})
    assert found(on_gpus(1), "cuda", {})
    assert not found(on_gpus(1), "cuda", {"device": "NVIDIA A100-SXM4-80GB"})
    assert not found(on_gpus(1), "cpu", {})


def took(built: House, stage: str, run: RunConfig, seconds: float, **changes: Any) -> Manifest:
    """The record of a build of a stage with these settings, which took so long."""
    manifest = built.plan().of(stage).manifest
    segments = ({"started": 0.0, "ended": seconds, "device": "cpu", **changes},)
    work = measure_work(stage_named(stage), run)
    made = dataclasses.replace(manifest.provenance, segments=segments, work=work)
    return dataclasses.replace(manifest, provenance=made)


TINY = open_profile("tiny").run
SMALL = open_profile("tiny", depth=1).run
_TRAINED = ("pretrain", "midtrain", "sft", "rl", "chat_eval_rl")


@pytest.mark.parametrize("stage", _TRAINED)
def test_builds_of_the_same_model_count_and_not_the_newest_by_their_median(built, stage):
    other = took(built, stage, SMALL, 500.0)
    times = (31.0, 900.0, 29.0, 30.0, 33.0)  # once the machine was busy
    first, *more = [took(built, stage, TINY, seconds) for seconds in times]
    for past, source in (
        *(([other, first], "last time"), ([first, other], "last time")),
        ([other, first, *more], "median of 5 builds"),
    ):
        found = estimate(stage_named(stage), TINY, past, PLACEMENT)
        assert (found.seconds, found.source) == (31.0, source)


@pytest.mark.parametrize(("depth", "nearest"), [(2, 1), (5, 4), (6, 4)])
def test_without_a_build_of_this_model_the_nearest_is_scaled(built, depth, nearest):
    run = open_profile("tiny", depth=depth).run
    history = [took(built, "sft", open_profile("tiny", depth=d).run, 100.0 * d) for d in (1, 4, 30)]
    found = estimate(stage_named("sft"), run, history, PLACEMENT)
    other = open_profile("tiny", depth=nearest).run
    ratio = measure_work(SFT, run).amount / measure_work(SFT, other).amount
    near = estimate(stage_named("sft"), other, history, PLACEMENT)
    assert near.seconds == 100.0 * nearest
    assert found.seconds == pytest.approx(ratio * near.seconds)
    assert found.source.startswith("at the pace of sft/")


def test_a_build_that_is_far_from_it_is_not_scaled(built):
    large = open_profile("tiny", depth=8).run
    amounts = [measure_work(SFT, run).amount for run in (large, SMALL)]
    assert amounts[0] > MAX_SCALED * amounts[1]
    assert estimate(SFT, large, [took(built, "sft", SMALL, 500.0)], PLACEMENT) is None


@pytest.mark.parametrize("profile", ["d12", "speedrun"])
def test_a_large_profile_is_not_estimated_from_builds_of_tiny(built, profile):
    run = open_profile(profile, snapshots=False).run
    for stage in (*REPORT.inputs, PRETRAIN):
        made = [took(built, stage.name, TINY, 30.0)]
        for place in (PLACEMENT, on_gpus(8)):
            assert estimate(stage, run, made, place) == estimate(stage, run, [], place)


def test_pretraining_on_gpus_is_not_scaled_from_a_toy_but_by_the_roofline(built):
    large, gpu = scaling.run_for_depth(20), on_gpus(8)
    toy = took(built, "pretrain", SMALL, 500.0, device="cuda")
    alone = estimate(stage_named("pretrain"), large, [], gpu)
    assert alone is not None
    kind = measure_work(stage_named("pretrain"), large).kind
    made = dataclasses.replace(toy.provenance.work, kind=kind)  # pyright: ignore
    toy = dataclasses.replace(toy, provenance=dataclasses.replace(toy.provenance, work=made))
    assert estimate(stage_named("pretrain"), large, [toy], gpu) == alone
    twin = took(built, "pretrain", large, 4000.0, device="cuda", processes=4)
    found = estimate(stage_named("pretrain"), large, [toy, twin], gpu)
    assert found.seconds == 2000.0  # on twice as many
