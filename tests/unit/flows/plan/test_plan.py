"""The plan: what is up to date, what would be built, and which change is to blame."""

import dataclasses
import json
import os

import pytest

from flows.artifacts import checkpoints
from flows.artifacts.publish import commit
from flows.identity.redo import RedoCounter, raise_redo
from flows.identity.ref import ArtifactRef
from flows.leases import file_lock
from flows.leases.held_lease import HeldLease, try_acquire
from flows.leases.lease import Lease
from flows.plan.reads import Resume
from flows.plan.render import render, to_tree
from flows.stages import STAGES
from nanochat_core.errors import ArtifactError, ConfigError
from tests.support.flows.claims import claim, dead_here
from tests.support.flows.house import NAMES, PLACEMENT, RUN, after, states, without, write_code
from tests.support.flows.shelf import make_manifest, put_artifact
from tests.support.small_job import small_job


def test_nothing_was_ever_built(house, shows):
    plan = shows(house.plan())
    assert not plan.up_to_date
    assert plan.of("shards").fingerprint is not None
    assert plan.of("pretrain").fingerprint is None
    assert plan.of("pretrain").after == ("rows", "tokenizer")


def test_all_is_up_to_date(built, shows):
    plan = shows(built.plan())
    assert plan.up_to_date
    assert states(plan) == "=" * len(STAGES)
    assert all(item.manifest and item.fingerprint and not item.reason for item in plan.stages)


# Work in progress.


def ref_of(house, stage):
    fingerprint = house.plan().of(stage).fingerprint
    assert fingerprint
    return ArtifactRef(stage, fingerprint)


def checkpoint(house, stage, step, *, total=400, text=None):
    work = file_lock.work_directory(house.work, ref_of(house, stage))
    directory = work / "checkpoints" / f"step-{step:07d}"
    directory.mkdir(parents=True)
    content = json.dumps({"step": step, "total": total}) if text is None else text
    (directory / "COMMIT.json").write_text(content)


def send_checkpoint(house, stage, step, *, total=400):
    """Leave a checkpoint in the store, as another machine does."""
    directory = house.root.parent / "elsewhere" / f"step-{step:07d}"
    directory.mkdir(parents=True)
    (directory / "COMMIT.json").write_text(json.dumps({"step": step, "total": total, "files": {}}))
    job = small_job(directory.parent, stage=stage, fingerprint=ref_of(house, stage).fingerprint)
    checkpoints.send(
        house.store, job, directory, owner="o", fencing_token=1, check_lease=lambda: None
    )


@pytest.fixture
def rows(house):
    """A house in which pretraining comes next."""
    house.build(until="rows")
    return house


def test_an_unfinished_job_is_resumed_at_its_newest_whole_checkpoint(rows, shows):
    for step in (9, 100, 20):
        checkpoint(rows, "pretrain", step)
    checkpoint(rows, "pretrain", 300, text='{"step": 3')
    plan = shows(rows.plan(placement=PLACEMENT))
    assert plan.of("pretrain").resume == Resume(step=100, total=400, in_store=False)


def test_an_unfinished_job_of_another_machine_is_resumed_from_the_store(rows, shows):
    send_checkpoint(rows, "pretrain", 200)
    plan = shows(rows.plan(), "pretrain")
    assert plan.of("pretrain").resume == Resume(step=200, total=400, in_store=True)
    checkpoint(rows, "pretrain", 200)  # as new, and here
    shows(rows.plan(), "pretrain")
    send_checkpoint(rows, "pretrain", 300)
    shows(rows.plan(), "pretrain")
    assert rows.plan(force=frozenset({"pretrain"})).of("pretrain").resume is None


def redo(house, stage):
    """Ask for a stage again; return its artifact and the one that comes out the same."""
    old = house.plan().of(stage).manifest
    raise_redo(house.store, old.ref, RedoCounter(), RedoCounter(number=1, runs=("r",)))
    again = old.identity.redone(1)
    return old, dataclasses.replace(old, fingerprint=again.fingerprint, preimage=again.preimage)


def test_a_rebuild_that_began_is_unfinished_work_until_its_artifact_exists(full_house, shows):
    old, new = redo(full_house, "pretrain")
    plan = shows(full_house.plan(), "pretrain", "sft")
    item = plan.of("pretrain")
    assert (item.manifest, item.identity) == (old, new.identity)
    checkpoint(full_house, "pretrain", 100)
    shows(full_house.plan(), "pretrain")
    commit(full_house.store, new)
    plan = full_house.plan()
    assert plan.of("pretrain").manifest == new
    # The bytes are the same: what was made from them stays, but for what reads the records.
    assert without(plan, "=") == {"report"}


def test_what_is_asked_for_again_before_a_stage_leaves_its_reason_alone(full_house):
    _, new = redo(full_house, "sft")
    commit(full_house.store, new)
    midtrain = full_house.plan().of("midtrain").manifest
    full_house.store.delete(midtrain.ref.manifest_key)
    assert full_house.plan().of("sft").state == "?"


def test_what_is_being_built_names_its_builder(rows):
    held = try_acquire(rows.store, ref_of(rows, "pretrain"), Lease.claim("d12-7"))
    assert isinstance(held, HeldLease)
    item = rows.plan().of("pretrain")
    assert item.state == "!"
    assert item.reason.startswith("by run d12-7 on host ")
    checkpoint(rows, "pretrain", 5, total=10)
    assert rows.plan().of("pretrain").reason.endswith("step 5/10")
    assert rows.plan().of("base_eval").after == ("pretrain",)
    held.release()
    assert rows.plan().of("pretrain").state == ">"


def test_what_another_machine_builds_has_its_progress_until_its_lease_expires(rows):
    held = try_acquire(rows.store, ref_of(rows, "pretrain"), claim("d12-7"))
    assert isinstance(held, HeldLease)
    held.note(step=310, total=900)
    held.renew()
    item = rows.plan().of("pretrain")
    assert (item.state, item.reason) == ("!", f"by {item.builder}")
    assert item.builder.startswith("run run-d12-7 on host host-d12-7, step 310/900, heartbeat ")
    lease = rows.root.parent / "store" / "pretrain" / item.fingerprint / "lease.json"
    now = lease.stat().st_mtime
    for age, state in ((121, "+"), (0, "!")):  # not renewed, it has expired
        os.utime(lease, (now - age, now - age))
        assert rows.plan().of("pretrain").state == state
    held.release()
    assert rows.plan().of("pretrain").state == "+"


def test_a_lease_of_a_process_that_was_killed_here_is_free(rows):
    try_acquire(rows.store, ref_of(rows, "pretrain"), claim("d12-7", **dead_here()))
    assert rows.plan().of("pretrain").state == "+"


# Imported from elsewhere.


def imported(number):
    config = {"imported": {"merges.bin": str(number)}}
    return make_manifest("tokenizer", config=config, created="2026-11-22T06:00:00Z")


def test_nothing_is_to_be_rebuilt_because_something_was_imported(house):
    put_artifact(house.store, imported(0))
    item = house.plan(placement=PLACEMENT).of("tokenizer")
    assert (item.state, item.reason, item.changes) == ("+", "", ())


def test_what_was_imported_since_hides_no_reason(full_house):
    for number in range(6):
        put_artifact(full_house.store, imported(number))
    write_code(full_house.root)
    (full_house.root / "nanochat_core" / "shared.py").write_text("SHARED = 2\n")
    item = full_house.plan(force=frozenset({"shards"})).of("tokenizer")
    assert (item.state, item.reason) == ("~", "code nanochat_core.shared changed; after shards")


# Asked for.


def test_force_redoes_one_stage_and_leaves_the_rest_to_its_outcome(built, shows):
    plan = shows(built.plan(force=frozenset({"sft"})))
    assert plan.of("sft").manifest is not None
    assert without(plan, "=") == after({"sft"})


def test_from_stage_redoes_everything_after_it(built, shows):
    plan = shows(built.plan(from_stage="sft"))
    assert without(plan, "=") == after({"sft"})


@pytest.mark.parametrize("options", [{"force": frozenset({"stf"})}, {"from_stage": "stf"}])
def test_a_stage_that_is_none_is_refused(built, options):
    with pytest.raises(ConfigError, match="there is no stage 'stf'") as caught:
        built.plan(**options)
    assert caught.value.hint == "did you mean 'sft'?"


# A record that cannot be read is not an artifact that does not exist.


def test_a_damaged_manifest_makes_no_plan(house):
    manifest = house.build(until="shards")["shards"]
    house.store.put(f"shards/{manifest.fingerprint}/manifest.json", b"{")
    with pytest.raises(ArtifactError, match="shards"):
        house.plan()


# As text and JSON.


def test_a_resumed_stage_takes_what_is_left(house, shows):
    house.build(run=dataclasses.replace(RUN, seed=1))
    house.build(until="rows")
    checkpoint(house, "pretrain", 300)
    plan = shows(house.plan(placement=PLACEMENT))
    estimate = plan.of("pretrain").estimate
    assert estimate.seconds == pytest.approx(25)
    table, *texts = render(plan)
    assert all(line == line.rstrip() and line.isascii() for line in [*table.lines(), *texts])


def test_the_json_has_the_same(built):
    run = dataclasses.replace(RUN, pretrain=dataclasses.replace(RUN.pretrain, num_steps=7))
    plan = built.plan(run, placement=PLACEMENT)
    tree = to_tree(plan)
    assert (tree["format"], tree["up_to_date"]) == (2, False)
    assert tree["summary"] == render(plan)[2]
    estimates = [item["estimate"] for item in tree["stages"] if item["estimate"]]
    assert tree["seconds"] == sum(estimate["seconds"] for estimate in estimates)
    stages = {item["stage"]: item for item in tree["stages"]}
    assert list(stages) == NAMES
    assert stages["rows"]["artifact"]["digest"] == plan.of("rows").manifest.digest
    assert stages["midtrain"]["after"] == ["pretrain"]
    pretrain = stages["pretrain"]
    assert pretrain["inputs"] == ["rows", "tokenizer"]
    assert pretrain["state"] == "~"
    change = {"kind": "config", "name": "pretrain.num_steps", "new": "7"}
    assert pretrain["changes"] == [change | {"old": str(RUN.pretrain.num_steps)}]
    assert pretrain["fingerprint"] == plan.of("pretrain").fingerprint
