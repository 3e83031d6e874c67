"""The plan: what is up to date, what would be built, and which change is to blame."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts import checkpoints
from flows.artifacts.publish import find_manifest, supersede
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.leases import file_lock
from flows.leases.lease import Claimant, LeaseGrant, release, renew, try_acquire
from flows.plan.estimate import MEASURED
from flows.plan.in_progress import Resume
from flows.plan.render import render, to_json
from flows.profiles import open_profile
from flows.stages import STAGES
from infra.storage.local import LocalStore
from nanochat_core import scaling
from nanochat_core.errors import ArtifactError, ConfigError, StoreError
from nanochat_core.job import Job
from nanochat_core.section import Tree
from tests.support.flows.house import (
    NAMES,
    PLACEMENT,
    RUN,
    House,
    after,
    on_gpus,
    states,
    without,
    write_code,
)
from tests.support.flows.shelf import make_manifest, put_artifact


def test_nothing_was_ever_built(house: House):
    plan = house.plan()
    assert states(plan) == "+" * len(STAGES)
    assert plan.exit_code == 2
    assert plan.of("shards").fingerprint is not None
    assert plan.of("pretrain").fingerprint is None
    assert plan.of("pretrain").reason == ""
    assert plan.of("pretrain").after == ("rows", "tokenizer")


def test_all_is_up_to_date(built: House):
    plan = built.plan()
    assert states(plan) == "=" * len(STAGES)
    assert plan.exit_code == 0
    assert all(item.manifest and item.fingerprint and not item.reason for item in plan.stages)
    assert render(plan)[-1] == f"nothing to run: {len(STAGES)} stages up to date"


# Work in progress.


def checkpoint(house: House, stage: str, step: int, *, total: int, text: str | None = None) -> Path:
    fingerprint = house.plan().of(stage).fingerprint
    assert fingerprint
    directory = (
        file_lock.work_directory(house.work, ArtifactRef(stage, fingerprint)) / "checkpoints"
    )
    directory = directory / f"step-{step:07d}"
    directory.mkdir(parents=True)
    content = json.dumps({"step": step, "total": total}) if text is None else text
    (directory / "COMMIT.json").write_text(content)
    return directory


def test_an_unfinished_job_is_resumed_at_its_newest_whole_checkpoint(house: House):
    house.build(until="rows")
    for step in (9, 100, 20):
        checkpoint(house, "pretrain", step, total=400)
    checkpoint(house, "pretrain", 300, total=400, text='{"step": 3')
    item = house.plan(placement=PLACEMENT).of("pretrain")
    assert item.state == ">"
    assert item.resume == Resume(step=100, total=400, in_store=False)
    assert item.reason == "step 100/400"


def send_checkpoint(house: House, stage: str, step: int, *, total: int) -> None:
    """A checkpoint that another machine left in the store."""
    fingerprint = house.plan().of(stage).fingerprint
    assert fingerprint
    directory = house.root.parent / "elsewhere" / f"step-{step:07d}"
    directory.mkdir(parents=True)
    (directory / "COMMIT.json").write_text(json.dumps({"step": step, "total": total, "files": {}}))
    job = Job(
        directory=directory.parent,
        stage=stage,
        entry="",
        fingerprint=fingerprint,
        config={},
        inputs={},
        resources=PLACEMENT.resources,
    )
    checkpoints.send(house.store, job, directory, owner="o", fencing_token=1, fence=lambda: None)


def test_an_unfinished_job_of_another_machine_is_resumed_from_the_store(house: House):
    house.build(until="rows")
    send_checkpoint(house, "pretrain", 200, total=400)
    item = house.plan().of("pretrain")
    assert item.state == ">"
    assert item.resume == Resume(step=200, total=400, in_store=True)
    assert item.reason == "step 200/400, from the store"
    checkpoint(house, "pretrain", 200, total=400)  # as new, and here
    assert house.plan().of("pretrain").reason == "step 200/400"
    send_checkpoint(house, "pretrain", 300, total=400)
    assert house.plan().of("pretrain").reason == "step 300/400, from the store"


def test_a_forced_run_resumes_nothing(house: House):
    house.build(until="rows")
    checkpoint(house, "pretrain", 100, total=400)
    send_checkpoint(house, "pretrain", 200, total=400)
    assert house.plan(force=frozenset({"pretrain"})).of("pretrain").resume is None


def test_what_is_being_built_says_by_whom(house: House):
    house.build(until="rows")
    fingerprint = house.plan().of("pretrain").fingerprint
    assert fingerprint
    path = file_lock.lock_path(house.work, ArtifactRef("pretrain", fingerprint))
    with file_lock.hold(path, lambda owner: None):
        item = house.plan().of("pretrain")
        assert item.state == "!"
        assert item.reason.startswith("by process ")
        checkpoint(house, "pretrain", 5, total=10)
        assert house.plan().of("pretrain").reason.endswith("step 5/10")
        assert house.plan().of("base_eval").after == ("pretrain",)
    assert house.plan().of("pretrain").state == ">"


def claim(run: str, host: str, home: str) -> Claimant:
    return Claimant(
        owner="o" + run, run=run, host=host, pid=7, home=home, since="2026-11-21T07:00:00Z"
    )


def test_what_another_machine_builds_says_how_far_it_is(house: House):
    house.build(until="rows")
    fingerprint = house.plan().of("pretrain").fingerprint
    assert fingerprint
    theirs = claim("d12-7", "far", "another home")
    held = try_acquire(house.store, ArtifactRef("pretrain", fingerprint), theirs, ttl=120)
    assert isinstance(held, LeaseGrant)
    held = renew(house.store, held, step=310, total=900)
    item = house.plan().of("pretrain")
    assert item.state == "!"
    assert item.builder is not None
    assert item.builder.startswith("run d12-7 on host far, step 310/900, heartbeat 0 s ago")
    assert item.reason == f"by {item.builder}"
    release(house.store, held)
    assert house.plan().of("pretrain").state == "+"


def test_a_lease_that_nobody_renews_is_nobodys(house: House):
    house.build(until="rows")
    fingerprint = house.plan().of("pretrain").fingerprint
    assert fingerprint
    try_acquire(
        house.store,
        ArtifactRef("pretrain", fingerprint),
        claim("d12-7", "far", "h"),
        ttl=120,
    )
    assert house.plan().of("pretrain").state == "!"
    path = house.root.parent / "store" / "pretrain" / fingerprint / "lease.json"
    long_ago = path.stat().st_mtime - 121
    os.utime(path, (long_ago, long_ago))
    assert house.plan().of("pretrain").state == "+"


def test_a_lease_of_a_process_that_was_killed_here_is_nobodys(house: House):
    house.build(until="rows")
    fingerprint = house.plan().of("pretrain").fingerprint
    assert fingerprint
    ours = claim("d12-7", "here", file_lock.home_id(house.work.parent))
    try_acquire(house.store, ArtifactRef("pretrain", fingerprint), ours, ttl=120)
    assert house.plan().of("pretrain").state == "+"
    with file_lock.hold(
        file_lock.lock_path(house.work, ArtifactRef("pretrain", fingerprint)), lambda owner: None
    ):
        assert house.plan().of("pretrain").reason.startswith("by run d12-7 on host here")


# Imported from elsewhere.


def imported(number: int) -> Manifest:
    config: dict[str, Tree] = {"imported": {"merges.bin": str(number)}}
    return make_manifest("tokenizer", config=config, created="2026-11-22T06:00:00Z")


def test_nothing_is_to_be_rebuilt_because_something_was_imported(house: House):
    put_artifact(house.store, imported(0))
    item = house.plan(placement=PLACEMENT).of("tokenizer")
    assert (item.state, item.reason, item.changes) == ("+", "", ())


def test_what_was_imported_since_hides_no_reason(full_house: House):
    for number in range(6):
        put_artifact(full_house.store, imported(number))
    write_code(full_house.root)
    (full_house.root / "nanochat_core" / "shared.py").write_text("SHARED = 2\n")
    item = full_house.plan(force=frozenset({"shards"})).of("tokenizer")
    assert (item.state, item.reason) == ("~", "code nanochat_core.shared changed; after shards")


# Asked for.


def test_force_redoes_one_stage_and_leaves_the_rest_to_its_outcome(built: House):
    plan = built.plan(force=frozenset({"sft"}))
    assert plan.of("sft").state == "~"
    assert plan.of("sft").reason == "asked for"
    assert plan.of("sft").manifest is not None
    assert plan.of("rl").state == "?"
    assert without(plan, "=") == after({"sft"})


def test_from_stage_redoes_everything_after_it(built: House):
    plan = built.plan(from_stage="sft")
    assert without(plan, "=") == after({"sft"})
    assert {item.state for item in plan.stages} == {"=", "~"}
    assert plan.of("rl").reason == "asked for; after sft"


@pytest.mark.parametrize("options", [{"force": frozenset({"stf"})}, {"from_stage": "stf"}])
def test_a_stage_that_is_none_is_refused(built: House, options: dict[str, Any]):
    with pytest.raises(ConfigError, match="there is no stage 'stf'") as caught:
        built.plan(**options)
    assert "sft" in (caught.value.hint or "")


def test_a_superseded_artifact_is_to_be_built_again(full_house: House):
    fingerprint = full_house.plan().of("sft").fingerprint
    assert fingerprint
    manifest = find_manifest(full_house.store, ArtifactRef("sft", fingerprint))
    assert manifest
    supersede(full_house.store, manifest, fence=lambda: None)
    plan = full_house.plan()
    assert plan.of("sft").fingerprint == fingerprint
    assert plan.of("sft").state == "+"
    assert without(plan, "=") == after({"sft"})


# Trouble is never "not there".


def test_a_store_that_cannot_be_reached_makes_no_plan(tmp_path: Path):
    house = House(
        write_code(tmp_path / "root"), LocalStore(tmp_path / "gone/store"), tmp_path / "w"
    )
    with pytest.raises(StoreError):
        house.plan()


def test_a_damaged_manifest_makes_no_plan(house: House):
    manifest = house.build(until="shards")["shards"]
    house.store.put(f"shards/{manifest.fingerprint}/manifest.json", b"{")
    with pytest.raises(ArtifactError, match="shards"):
        house.plan()


# Estimates.


def test_a_stage_takes_as_long_as_it_took(full_house: House):
    run = dataclasses.replace(RUN, rows=dataclasses.replace(RUN.rows, buffer_documents=5))
    estimate = full_house.plan(run, placement=PLACEMENT).of("rows").estimate
    assert estimate is not None
    assert estimate.seconds == 100
    assert estimate.dollars == pytest.approx(0.1)
    assert estimate.source == "last time"
    assert full_house.plan(run).of("rows").estimate is None


def test_pretraining_is_scaled_by_its_flops(built: House):
    manifest = built.plan().of("pretrain").manifest
    assert manifest
    steps = RUN.pretrain.num_steps * 2
    run = dataclasses.replace(RUN, pretrain=dataclasses.replace(RUN.pretrain, num_steps=steps))
    estimate = built.plan(run, placement=PLACEMENT).of("pretrain").estimate
    assert estimate is not None
    assert estimate.seconds == pytest.approx(200)
    assert manifest.name in estimate.source


def test_other_text_and_other_questions_take_another_time(full_house: House):
    shards = dataclasses.replace(RUN.shards, source="local", path="/x")
    evaluation = dataclasses.replace(RUN.chat_eval, tasks=RUN.chat_eval.tasks[:1])
    run = dataclasses.replace(RUN, shards=shards, chat_eval=evaluation)
    plan = full_house.plan(run, placement=PLACEMENT)
    assert [plan.of(n).estimate for n in ("shards", "tokens", "chat_eval_sft")] == [None] * 3
    assert plan.of("sft").estimate is not None  # its conversations are the same
    assert "at least" in render(plan)[-1]
    unknown = sum(i.estimate is None and i.state != "=" for i in plan.stages)
    assert f"({unknown} stages not timed yet)" in render(plan)[-1]


def test_a_first_plan_on_a_cpu_says_what_the_smallest_profile_took(house: House):
    run = open_profile("tiny").run
    plan = house.plan(run, placement=PLACEMENT)
    found = {i.stage.name: i.estimate for i in plan.stages if i.estimate is not None}
    assert {name: e.seconds for name, e in found.items()} == MEASURED
    assert {e.source for e in found.values()} == {"as measured on two cores"}
    assert set(MEASURED) == {stage.name for stage in STAGES}
    assert "about" in render(plan)[-1]
    longer = dataclasses.replace(run.pretrain, num_steps=2 * run.pretrain.num_steps)
    twice = house.plan(dataclasses.replace(run, pretrain=longer), placement=PLACEMENT)
    estimate = twice.of("pretrain").estimate
    assert estimate is not None
    assert estimate.seconds == 2 * MEASURED["pretrain"]


def test_without_history_only_pretraining_of_a_large_model_has_an_estimate(house: House):
    large = scaling.run_for_depth(4)
    plan = house.plan(large, placement=PLACEMENT)
    estimates = {i.stage.name: i.estimate for i in plan.stages if i.estimate is not None}
    assert set(estimates) == {"pretrain", "report"}
    assert estimates["pretrain"].source == "no GPU: a guess, 30 GFLOP/s a thread"
    gpu = on_gpus(8, dollars_per_hour=0.0)
    faster = house.plan(large, placement=gpu).of("pretrain").estimate
    assert faster is not None
    assert faster.source == "if H100s, at 40% MFU, $3 an hour each"
    assert faster.seconds < estimates["pretrain"].seconds
    assert faster.dollars == pytest.approx(faster.seconds / 3600 * 8 * 3)
    two = house.plan(large, placement=dataclasses.replace(gpu, nodes=2)).of("pretrain").estimate
    assert two is not None
    assert (two.seconds, two.dollars) == pytest.approx((faster.seconds / 2, faster.dollars))


def test_the_gpu_of_this_machine_is_what_pretraining_is_estimated_for(
    house: House, monkeypatch: pytest.MonkeyPatch
):
    gpu = on_gpus(8, dollars_per_hour=0.0)
    assumed = house.plan(placement=gpu).of("pretrain").estimate
    monkeypatch.setattr("flows.plan.estimate.gpu_name", lambda: "NVIDIA A100-SXM4-80GB")
    known = house.plan(placement=gpu).of("pretrain").estimate
    pooled = dataclasses.replace(gpu, pool="gpu")  # another machine's GPUs
    assert house.plan(placement=pooled).of("pretrain").estimate == assumed
    assert assumed is not None
    assert known is not None
    assert known.source == "8 x NVIDIA A100-SXM4-80GB, at 40% MFU"
    assert (known.dollars, known.on_gpus) == (0, True)  # no price is known
    assert known.seconds == pytest.approx(assumed.seconds * 989 / 312)


def test_a_machine_that_would_take_months_is_named_and_has_no_price(house: House):
    gpu = on_gpus(8, dollars_per_hour=0.0)
    assert "warning" not in "\n".join(render(house.plan(placement=gpu)))
    lines = render(house.plan(scaling.run_for_depth(24), placement=PLACEMENT))
    assert lines[-1].startswith("warning: this machine cannot train this model: pretrain would")
    assert "--pool" in lines[-1]


def test_a_time_on_another_kind_of_device_tells_nothing(full_house: House):
    gpu = on_gpus(1)
    plan = full_house.plan(scaling.run_for_depth(5), placement=gpu)
    assert plan.of("sft").estimate is None
    assert plan.of("rows").estimate is not None  # runs on the CPU anyway


def test_a_resumed_stage_takes_what_is_left(house: House):
    house.build(run=dataclasses.replace(RUN, seed=1))
    house.build(until="rows")
    checkpoint(house, "pretrain", 300, total=400)
    estimate = house.plan(placement=PLACEMENT).of("pretrain").estimate
    assert estimate is not None
    assert estimate.seconds == pytest.approx(25)


# As text and JSON.


def test_the_text_has_a_line_a_stage_and_a_summary(house: House):
    house.build(run=dataclasses.replace(RUN, seed=1))
    house.build(until="rows")
    checkpoint(house, "pretrain", 300, total=400)
    plan = house.plan(placement=PLACEMENT)
    lines = render(plan)
    assert [line.split()[1] for line in lines[: len(STAGES)]] == NAMES
    assert [line[0] for line in lines[: len(STAGES)]] == [item.state for item in plan.stages]
    assert lines[-2] == ""
    assert "1 to resume" in lines[-1]
    assert "5 up to date" in lines[-1]
    assert "about" in lines[-1]
    assert all(line == line.rstrip() and line.isascii() for line in lines)


def test_the_json_says_the_same(built: House):
    run = dataclasses.replace(RUN, pretrain=dataclasses.replace(RUN.pretrain, num_steps=7))
    plan = built.plan(run, placement=PLACEMENT)
    tree = json.loads(to_json(plan))
    assert tree["exit_code"] == 2
    assert [item["stage"] for item in tree["stages"]] == NAMES
    pretrain = tree["stages"][NAMES.index("pretrain")]
    assert pretrain["state"] == "~"
    assert pretrain["changes"] == [
        {
            "kind": "config",
            "name": "pretrain.num_steps",
            "old": str(RUN.pretrain.num_steps),
            "new": "7",
        }
    ]
    assert pretrain["fingerprint"] == plan.of("pretrain").fingerprint


# Speed, and what a plan does without.
