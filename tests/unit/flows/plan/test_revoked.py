"""The plan after an artifact was taken back: it is built again, and whoever used it says so."""

import dataclasses
import json

import pytest

from flows.artifacts.revocations import revoke, undo_revocation
from flows.identity.manifest import Manifest
from flows.plan.render import render, to_json
from nanochat_core.errors import ArtifactError
from tests.support.flows.house import PLACEMENT, RUN, House, after, without
from tests.support.flows.shelf import ACCEPTED


def take_back(house: House, stage: str, why: str = "trained on test data") -> Manifest:
    manifest = house.plan().of(stage).manifest
    assert manifest
    revoke(house.store, manifest, why=why, who="ann@desk", when="2026-11-21T07:00:00Z")
    return manifest


def test_a_revoked_artifact_is_to_be_built_again_and_every_descendant_is_flagged(full_house: House):
    manifest = take_back(full_house, "pretrain")
    plan = full_house.plan(placement=PLACEMENT)
    item = plan.of("pretrain")
    assert item.state == "x"
    assert item.reason == "revoked 2026-11-21T07:00:00Z: trained on test data"
    assert item.estimate is not None
    assert not plan.up_to_date
    assert without(plan, "=") == after({"pretrain"})
    for name in after({"pretrain"}) - {"pretrain"}:
        assert plan.of(name).state == "?"
        assert plan.of(name).reason == f"made from revoked {manifest.name}"
        assert plan.of(name).after == ("pretrain",)
    assert "1 revoked" in render(plan)[-1]


def test_an_artifact_that_is_valid_again_is_up_to_date(full_house: House):
    undo_revocation(full_house.store, take_back(full_house, "pretrain"))
    assert full_house.plan().up_to_date


def test_a_revoked_artifact_after_a_revoked_one_is_both(full_house: House):
    first = take_back(full_house, "pretrain", "wrong rows")
    second = full_house.plan().of("sft").manifest
    assert second
    revoke(full_house.store, second, why="rude", who="bob@desk", when="2026-11-22T07:00:00Z")
    plan = full_house.plan()
    assert plan.of("sft").state == "x"
    assert plan.of("sft").reason == (
        f"revoked 2026-11-22T07:00:00Z: rude; made from revoked {first.name}"
    )
    assert plan.of("rl").reason == f"made from revoked {first.name}, {second.name}"
    assert plan.of("rl").after == ("sft",)


def test_a_descendant_that_changed_says_its_own_change(full_house: House):
    take_back(full_house, "pretrain")
    run = dataclasses.replace(RUN, sft=dataclasses.replace(RUN.sft, num_epochs=9))
    plan = full_house.plan(run)
    assert plan.of("sft").state == "~"
    assert plan.of("sft").reason == f"sft.num_epochs {RUN.sft.num_epochs} -> 9; after pretrain"


def test_what_was_accepted_is_revoked_with_the_artifact_it_came_from(full_house: House):
    manifest = full_house.plan().of("sft").manifest
    assert manifest
    origin = dataclasses.replace(manifest, fingerprint="a" * 64)
    taken = dataclasses.replace(manifest, accepted={**ACCEPTED, "from": "a" * 64})
    full_house.store.put(f"sft/{manifest.fingerprint}/manifest.json", taken.to_json())
    assert full_house.plan().up_to_date
    revoke(full_house.store, origin, why="rude", who="ann@desk", when="2026-11-21T07:00:00Z")
    item = full_house.plan().of("sft")
    assert item.state == "x"
    assert item.reason == "the same as sft/aaaaaaaaaaaa, revoked 2026-11-21T07:00:00Z: rude"


def test_a_damaged_revocation_makes_no_plan(full_house: House):
    manifest = take_back(full_house, "sft")
    full_house.store.put(f"sft/{manifest.fingerprint}/revoked.json", b"{")
    with pytest.raises(ArtifactError, match=r"revoked\.json"):
        full_house.plan()


def test_the_json_says_who_took_back_what(full_house: House):
    manifest = take_back(full_house, "midtrain")
    plan = full_house.plan()
    stages = {item["stage"]: item for item in json.loads(to_json(plan))["stages"]}
    said = {
        "stage": "midtrain",
        "fingerprint": manifest.fingerprint,
        "when": "2026-11-21T07:00:00Z",
        "who": "ann@desk",
        "why": "trained on test data",
    }
    assert stages["midtrain"]["state"] == "x"
    assert stages["midtrain"]["revoked"] == said
    assert stages["rl"]["revoked"] is None
    assert stages["rl"]["revoked_ancestors"] == [said]
    assert stages["pretrain"]["revoked_ancestors"] == []
