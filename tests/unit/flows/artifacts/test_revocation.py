"""Revoked artifacts: which uses are refused, which are warned of, and what still works."""

import dataclasses
from pathlib import Path

import pytest

from flows.artifacts.revocations import (
    accepted_from,
    ancestors_revoked,
    check_not_revoked,
    find_revocation,
    find_revoked,
    one_line,
    revoke,
    undo_revocation,
)
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.stages import REPORT, STAGES, stages_to_redo
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError
from tests.support.flows.shelf import ACCEPTED, Counting, make_manifest, put_artifact

WHEN = "2026-11-21T07:00:00Z"


def take_back(store: Store, manifest: Manifest, why: str = "trained on test data") -> None:
    revoke(store, manifest, why=why, who="ann@desk", when=WHEN)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "store")


@pytest.fixture
def made(store: Counting) -> dict[str, Manifest]:
    """An artifact of each stage, made from those of its inputs."""
    made: dict[str, Manifest] = {}
    for stage in STAGES:
        inputs = {source.name: made[source.name] for source in stage.inputs}
        made[stage.name] = put_artifact(store, make_manifest(stage.name, inputs=inputs))
    return made


def test_a_revocation_says_who_when_and_why(store, made):
    assert find_revocation(store, ArtifactRef("sft", made["sft"].fingerprint)) is None
    take_back(store, made["sft"], "trained on\n  test data ")
    found = find_revocation(store, ArtifactRef("sft", made["sft"].fingerprint))
    assert str(found) == f"revoked {WHEN} by ann@desk: trained on test data"


def test_every_stage_knows_its_ancestors_and_no_others(store, made):
    take_back(store, made["pretrain"])
    after = {name for name, manifest in made.items() if ancestors_revoked(store, manifest)}
    assert after == stages_to_redo(STAGES, force=(), from_stage="pretrain") - {"pretrain"}


def test_an_ancestor_that_is_gone_ends_the_search_in_its_direction(store, made):
    take_back(store, made["pretrain"])
    take_back(store, made["midtrain"])
    store.delete(f"midtrain/{made['midtrain'].fingerprint}/manifest.json")
    assert [r.ref.stage for r in ancestors_revoked(store, made["sft"])] == ["midtrain"]
    store.put(f"midtrain/{made['midtrain'].fingerprint}/manifest.json", b"{")
    assert [r.ref.stage for r in ancestors_revoked(store, made["sft"])] == ["midtrain"]


def test_each_ancestor_is_asked_for_once(store, made):
    ancestors_revoked(store, made["report"])
    assert len(store.gets) == len(set(store.gets)) == 2 * len(REPORT.inputs)


def accepted(manifest: Manifest, *origins: str) -> Manifest:
    first, *earlier = origins
    return dataclasses.replace(manifest, accepted={**ACCEPTED, "from": first, "earlier": earlier})


def test_bytes_that_were_accepted_are_revoked_with_their_origin(store, made):
    again = accepted(made["sft"], "a" * 64, "b" * 64)
    assert [ref.fingerprint for ref in accepted_from(again)] == ["a" * 64, "b" * 64]
    assert find_revoked(store, again) is None
    take_back(store, dataclasses.replace(made["sft"], fingerprint="b" * 64))
    found = find_revoked(store, again)
    assert found.ref.name == "sft/bbbbbbbbbbbb"
    with pytest.raises(ArtifactError, match=r"\(the bytes of sft/bbbbbbbbbbbb\) was revoked"):
        check_not_revoked(store, again)
    assert find_revoked(store, made["sft"]) is None


def test_who_revokes_first_is_who_did_it(store, made):
    take_back(store, made["sft"], "first")
    with pytest.raises(ArtifactError, match=r"was revoked .* by ann@desk: first") as caught:
        take_back(store, made["sft"], "second")
    assert "--undo" in (caught.value.hint or "")


def test_what_is_not_revoked_cannot_be_made_valid(store, made):
    with pytest.raises(ArtifactError, match="is not revoked"):
        undo_revocation(store, made["sft"])
    take_back(store, made["sft"], "why")
    assert undo_revocation(store, made["sft"]).why == "why"
    take_back(store, made["sft"])


@pytest.mark.parametrize("why", ["", "  \n", "bell\a"])
def test_a_reason_says_something_in_a_line(store, made, why):
    with pytest.raises(ConfigError):
        take_back(store, made["sft"], why)
    assert one_line("a\n b\t c ") == "a b c"
