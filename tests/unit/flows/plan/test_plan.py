"""The plan: what is up to date, what would be built, and which change is to blame."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from flows.artifacts import checkpoints
from flows.artifacts.publish import commit
from flows.identity.manifest import Manifest
from flows.identity.redo import RedoCounter, raise_redo
from flows.identity.ref import ArtifactRef
from flows.leases import file_lock
from flows.leases.held_lease import HeldLease, try_acquire
from flows.leases.lease import Lease
from flows.plan.in_progress import Resume
from flows.plan.render import render, to_json
from flows.stages import STAGES
from nanochat_core.errors import ArtifactError, ConfigError
from nanochat_core.section import Tree
from tests.support.flows.claims import claim, dead_here
from tests.support.flows.house import (
    NAMES,
    PLACEMENT,
    RUN,
    House,
    after,
    states,
    without,
    write_code,
)
from tests.support.flows.shelf import make_manifest, put_artifact
from tests.support.small_job import small_job


def test_nothing_was_ever_built(house: House):
    plan = house.plan()
    assert states(plan) == "+" * len(STAGES)
    assert not plan.up_to_date
    assert plan.of("shards").fingerprint is not None
    assert plan.of("pretrain").fingerprint is None
    assert plan.of("pretrain").reason == ""
    assert plan.of("pretrain").after == ("rows", "tokenizer")


def test_all_is_up_to_date(built: House):
    plan = built.plan()
    assert states(plan) == "=" * len(STAGES)
    assert plan.up_to_date
    assert all(item.manifest and item.fingerprint and not item.reason for item in plan.stages)
    assert render(plan)[-1] == f"nothing to run: {len(STAGES)} stages up to date"


# Work in progress.


def ref_of(house: House, stage: str) -> ArtifactRef:
    fingerprint = house.plan().of(stage).fingerprint
    assert fingerprint
    return ArtifactRef(stage, fingerprint)


def checkpoint(house: House, stage: str, step: int, *, total: int, text: str | None = None) -> Path:
    work = file_lock.work_directory(house.work, ref_of(house, stage))
    directory = work / "checkpoints" / f"step-{step:07d}"
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
    directory = house.root.parent / "elsewhere" / f"step-{step:07d}"
    directory.mkdir(parents=True)
    (directory / "COMMIT.json").write_text(json.dumps({"step": step, "total": total, "files": {}}))
    job = small_job(directory.parent, stage=stage, fingerprint=ref_of(house, stage).fingerprint)
    checkpoints.send(
        house.store, job, directory, owner="o", fencing_token=1, check_lease=lambda: None
    )


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


def test_a_rebuild_that_began_is_unfinished_work_until_its_artifact_exists(house: House):
    house.build()
    pretrain = house.plan().of("pretrain").manifest
    assert pretrain
    raise_redo(house.store, pretrain.ref, RedoCounter(), RedoCounter(number=1, runs=("r",)))
    item = house.plan().of("pretrain")
    again = pretrain.identity.redone(1)
    assert (item.state, item.reason) == ("~", "rebuild has begun")
    assert (item.manifest, item.identity) == (pretrain, again)
    assert house.plan().of("sft").state == "?"
    checkpoint(house, "pretrain", 100, total=400)
    assert house.plan().of("pretrain").reason == "step 100/400"
    new = dataclasses.replace(pretrain, fingerprint=again.fingerprint, preimage=again.preimage)
    commit(house.store, new, attempt="b", check_lease=lambda: None)
    plan = house.plan()
    assert plan.of("pretrain").manifest == new
    # The bytes are the same: what was made from them stays, but for what reads the records.
    assert {item.stage.name for item in plan.stages if item.state != "="} == {"report"}


def test_what_is_being_built_says_by_whom(house: House):
    house.build(until="rows")
    held = try_acquire(house.store, ref_of(house, "pretrain"), Lease.claim("d12-7"))
    assert isinstance(held, HeldLease)
    item = house.plan().of("pretrain")
    assert item.state == "!"
    assert item.reason.startswith("by run d12-7 on host ")
    checkpoint(house, "pretrain", 5, total=10)
    assert house.plan().of("pretrain").reason.endswith("step 5/10")
    assert house.plan().of("base_eval").after == ("pretrain",)
    held.release()
    assert house.plan().of("pretrain").state == ">"


def test_what_another_machine_builds_says_how_far_it_is(house: House):
    house.build(until="rows")
    held = try_acquire(house.store, ref_of(house, "pretrain"), claim("d12-7"))
    assert isinstance(held, HeldLease)
    held.note(step=310, total=900)
    held.renew()
    item = house.plan().of("pretrain")
    assert item.state == "!"
    assert item.builder is not None
    assert item.fingerprint is not None
    assert item.builder.startswith(
        "run run-d12-7 on host host-d12-7, step 310/900, heartbeat 0 s ago"
    )
    assert item.reason == f"by {item.builder}"
    lease = house.root.parent / "store" / "pretrain" / item.fingerprint / "lease.json"
    now = lease.stat().st_mtime
    os.utime(lease, (now - 121, now - 121))
    assert house.plan().of("pretrain").state == "+"  # not renewed, it has expired
    os.utime(lease, (now, now))
    assert house.plan().of("pretrain").state == "!"
    held.release()
    assert house.plan().of("pretrain").state == "+"


def test_a_lease_of_a_process_that_was_killed_here_is_free(house: House):
    house.build(until="rows")
    ref = ref_of(house, "pretrain")
    try_acquire(house.store, ref, claim("d12-7", **dead_here()))
    assert house.plan().of("pretrain").state == "+"


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
    assert caught.value.hint == "did you mean 'sft'?"


# Trouble is never "not there".


def test_a_damaged_manifest_makes_no_plan(house: House):
    manifest = house.build(until="shards")["shards"]
    house.store.put(f"shards/{manifest.fingerprint}/manifest.json", b"{")
    with pytest.raises(ArtifactError, match="shards"):
        house.plan()


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
    assert not tree["up_to_date"]
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


def test_what_is_asked_for_again_before_a_stage_leaves_its_reason_alone(house: House):
    made = house.build()
    raise_redo(house.store, made["sft"].ref, RedoCounter(), RedoCounter(number=1, runs=("r",)))
    again = made["sft"].identity.redone(1)
    new = dataclasses.replace(
        made["sft"], fingerprint=again.fingerprint, preimage=again.preimage, accepted=None
    )
    commit(house.store, new, attempt="b", check_lease=lambda: None)
    house.store.delete(made["midtrain"].ref.manifest_key)
    assert house.plan().of("sft").state == "?"
