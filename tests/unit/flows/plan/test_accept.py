"""Taking an artifact over after a refactor: what may differ, and that nothing is half done."""

import dataclasses
from typing import Any

import pytest

from flows.artifacts.publish import Published, find_manifest, newest_manifests
from flows.artifacts.revocations import accepted_from, revoke
from flows.identity.fingerprint import fingerprint_of
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.plan.accept import Offer, accept, find_offer
from flows.stages import stage_named
from infra.storage.base import Store
from nanochat_core.config import RunConfig
from nanochat_core.errors import ArtifactError, ConfigError
from tests.support.flows.house import RUN, House, after, without

WHEN = "2026-11-22T09:00:00Z"
LATER, LATEST = "2026-11-22T06:00:00Z", "2026-11-22T07:00:00Z"  # than other artifacts


def refactor(house: House, stage: str, text: str = "REFACTORED = 1") -> None:
    path = house.root / f"{stage_named(stage).entry.replace('.', '/')}.py"
    path.write_text(f"{path.read_text()}{text}\n")


def offered(house: House, stage: str, **options: Manifest) -> Offer:
    offer = find_offer(house.store, house.plan(), stage, **options)
    assert offer is not None
    return offer


def take(house: House, stage: str, why: str = "why") -> Published:
    offer = offered(house, stage)
    return accept(house.store, offer, why=why, who="ann@desk", when=WHEN, proof=None)


def revoked(store: Store, manifest: Manifest) -> None:
    revoke(store, manifest, why="rude", who="bob@desk", when=WHEN)


def test_what_was_accepted_is_up_to_date_and_so_is_all_but_the_report_that_shows_it(full_house):
    old = full_house.plan().of("pretrain").manifest
    assert old
    refactor(full_house, "pretrain")
    assert without(full_house.plan(), "=") == after({"pretrain"})
    offer = offered(full_house, "pretrain")
    assert offer.manifest == old
    assert offer.what_changed == "code nanochat_core.train.pretrain changed"
    acceptance = take(full_house, "pretrain", why="only\n a name")
    assert without(full_house.plan(), "=") == {"report"}
    new = full_house.plan().of("pretrain").manifest
    assert new == acceptance.manifest
    assert not acceptance.adopted
    assert new.fingerprint != old.fingerprint
    assert new.files == old.files
    assert new.digest == old.digest
    assert new.provenance == old.provenance
    assert new.accepted == {
        "from": old.fingerprint,
        "earlier": [],
        "code": old.preimage["code"],
        "why": "only a name",
        "when": WHEN,
        "who": "ann@desk",
        "proof": None,
    }


def test_what_was_accepted_is_the_latest_of_its_stage_and_remembers_what_it_came_from(full_house):
    first = full_house.plan().of("sft").manifest
    refactor(full_house, "sft")
    second = take(full_house, "sft").manifest
    assert next(newest_manifests(full_house.store, "sft", 5)) == second
    refactor(full_house, "sft", "AGAIN = 1")
    third = take(full_house, "sft").manifest
    assert accepted_from(third) == (second.ref, first.ref)
    assert third.files == first.files
    assert third.accepted["code"] == first.preimage["code"]


def refused(house: House, stage: str, error: str, run: RunConfig = RUN, **options: Any) -> str:
    """Return the hint of the error that refuses to accept an artifact."""
    with pytest.raises((ArtifactError, ConfigError), match=error) as caught:
        find_offer(house.store, house.plan(run), stage, **options)
    return caught.value.hint or ""


def test_nothing_is_accepted_that_is_up_to_date(built):
    assert find_offer(built.store, built.plan(), "sft") is None


# What may differ.


def test_another_setting_or_input_is_never_accepted_and_is_named(full_house):
    run = dataclasses.replace(RUN, sft=dataclasses.replace(RUN.sft, num_epochs=7))
    error = rf"cannot be accepted: sft\.num_epochs {RUN.sft.num_epochs} -> 7$"
    assert "--from sft/" in refused(full_house, "sft", error, run)
    refactor(full_house, "tokenizer")
    full_house.build(until="tokenizer")  # with other contents
    refused(full_house, "tokens", r"tokens/\w+ cannot be accepted: input tokenizer cha")


def test_an_input_made_anew_with_the_same_contents_is_the_same(house):
    house.build(content=lambda fingerprint: "same")
    refactor(house, "tokenizer")
    house.build(until="tokenizer", content=lambda fingerprint: "same")
    refactor(house, "sft")
    acceptance = take(house, "sft")
    midtrain = house.plan().of("midtrain").manifest
    assert acceptance.manifest.inputs["midtrain"].fingerprint == midtrain.fingerprint


def test_inputs_come_first(full_house):
    refactor(full_house, "pretrain")
    refactor(full_house, "sft")
    hint = refused(full_house, "sft", "sft cannot be accepted before pretrain")
    assert hint == "accept or run pretrain first"
    take(full_house, "pretrain")
    take(full_house, "sft")
    assert without(full_house.plan(), "=") == {"report"}


def test_another_format_of_the_files_may_be_accepted(full_house):
    old = full_house.plan().of("sft").manifest
    preimage = old.preimage | {"format": 7}
    other = dataclasses.replace(old, preimage=preimage, fingerprint=fingerprint_of(preimage))
    full_house.store.delete(f"sft/{old.fingerprint}/manifest.json")
    full_house.store.put(f"sft/{other.fingerprint}/manifest.json", other.to_json())
    offer = offered(full_house, "sft", origin=other)
    assert offer.what_changed == "file format 7 -> 1"


# Which artifact.


def test_the_latest_that_fits_is_offered_and_another_may_be_named(full_house):
    first = full_house.plan().of("sft").manifest
    refactor(full_house, "sft")
    second = full_house.build(created=LATER)["sft"]
    run = dataclasses.replace(RUN, sft=dataclasses.replace(RUN.sft, num_epochs=7))
    full_house.build(run=run, created=LATEST)  # does not fit
    refactor(full_house, "sft", "AGAIN = 1")
    assert offered(full_house, "sft").manifest == second
    assert offered(full_house, "sft", origin=first).manifest == first
    assert offered(full_house, "sft", origin=second).manifest == second
    other = full_house.plan().of("midtrain").manifest
    refused(full_house, "sft", "is of stage midtrain, not sft", origin=other)


def test_a_revoked_artifact_is_passed_over_and_refused_when_named(full_house):
    first = full_house.plan().of("sft").manifest
    assert first
    refactor(full_house, "sft")
    second = full_house.build(created=LATER)["sft"]
    refactor(full_house, "sft", "AGAIN = 1")
    revoked(full_house.store, second)
    assert offered(full_house, "sft").manifest == first
    refused(full_house, "sft", r"cannot be accepted: sft/.*rude", origin=second)
    revoked(full_house.store, first)
    refused(full_house, "sft", r"cannot be accepted: sft/.*rude")


def test_an_artifact_that_is_there_but_revoked_is_not_replaced(full_house):
    revoked(full_house.store, full_house.plan().of("sft").manifest)
    refused(full_house, "sft", "sft was revoked")


def test_without_any_artifact_there_is_nothing_to_accept(house):
    house.build(until="tokens")
    refused(house, "rows", "no artifact of rows")


# Files that are not there.


def test_files_that_are_cut_short_or_gone_are_not_accepted(full_house):
    refactor(full_house, "sft")
    offer = offered(full_house, "sft")
    full_house.store.put(offer.manifest.files[0].key, b"short")
    with pytest.raises(ArtifactError, match="data has 5 bytes, not 64"):
        accept(full_house.store, offer, why="why", who="ann", when=WHEN, proof=None)
    full_house.store.delete(offer.manifest.files[0].key)
    with pytest.raises(ArtifactError, match=r"are not in file:///.*: data is gone"):
        accept(full_house.store, offer, why="why", who="ann", when=WHEN, proof=None)
    assert find_manifest(full_house.store, ArtifactRef("sft", offer.identity.fingerprint)) is None
