"""The plan after an artifact was revoked: it is built again, and all that was made from it."""

import dataclasses

import pytest

from flows.artifacts.revocations import revoke, undo_revocation
from flows.plan.render import to_tree
from nanochat_core.errors import ArtifactError
from tests.support.flows.house import PLACEMENT, RUN, after, without
from tests.support.flows.shelf import ACCEPTED

BY_ANN = {"who": "ann@desk", "when": "2026-11-21T07:00:00Z"}


def take_back(house, stage, why="trained on test data", **by):
    manifest = house.plan().of(stage).manifest
    assert manifest
    revoke(house.store, manifest, why=why, **(BY_ANN | by))
    return manifest


def test_a_revoked_artifact_is_to_be_built_again_and_every_descendant_is_flagged(full_house, shows):
    manifest = take_back(full_house, "pretrain")
    plan = shows(full_house.plan(placement=PLACEMENT))
    assert not plan.up_to_date
    assert without(plan, "=") == after({"pretrain"})
    assert plan.of("rl").after == ("pretrain",)
    undo_revocation(full_house.store, manifest)
    assert full_house.plan().up_to_date


def test_a_revocation_that_came_without_its_artifact_counts(full_house):
    full_house.store.delete(take_back(full_house, "pretrain").ref.manifest_key)
    assert full_house.plan().of("pretrain").identity.redo == 1


def test_a_revoked_artifact_after_a_revoked_one_is_both(full_house, shows):
    sft = full_house.plan().of("sft").manifest
    assert sft
    take_back(full_house, "pretrain", "wrong rows")
    revoke(full_house.store, sft, why="rude", who="bob@desk", when="2026-11-22T07:00:00Z")
    assert shows(full_house.plan(), "pretrain", "sft", "rl").of("rl").after == ("sft",)


def test_a_descendant_that_changed_has_its_own_change(full_house, shows):
    take_back(full_house, "pretrain")
    run = dataclasses.replace(RUN, sft=dataclasses.replace(RUN.sft, num_epochs=9))
    shows(full_house.plan(run), "sft")


def test_what_was_accepted_is_revoked_with_the_artifact_it_came_from(full_house, shows):
    manifest = full_house.plan().of("sft").manifest
    origin = dataclasses.replace(manifest, fingerprint="a" * 64)
    taken = dataclasses.replace(manifest, accepted={**ACCEPTED, "from": "a" * 64})
    full_house.store.put(f"sft/{manifest.fingerprint}/manifest.json", taken.to_json())
    assert full_house.plan().up_to_date
    revoke(full_house.store, origin, why="rude", **BY_ANN)
    shows(full_house.plan(), "sft")


def test_a_damaged_revocation_makes_no_plan(full_house):
    manifest = take_back(full_house, "sft")
    full_house.store.put(f"sft/{manifest.fingerprint}/revoked.json", b"{")
    with pytest.raises(ArtifactError, match=r"revoked\.json"):
        full_house.plan()


def test_the_json_has_revocations_with_their_reasons(full_house):
    manifest = take_back(full_house, "midtrain")
    stages = {item["stage"]: item for item in to_tree(full_house.plan())["stages"]}
    revoked = {"stage": "midtrain", "fingerprint": manifest.fingerprint, **BY_ANN}
    revoked["why"] = "trained on test data"
    assert stages["midtrain"]["state"] == "x"
    assert stages["midtrain"]["revoked"] == revoked
    assert stages["rl"]["revoked"] is None
    assert stages["rl"]["revoked_ancestors"] == [revoked]
    assert stages["pretrain"]["revoked_ancestors"] == []
