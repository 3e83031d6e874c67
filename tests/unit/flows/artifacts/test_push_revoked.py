"""Who pushes what was made from a revoked artifact is warned, and so is the other side."""

import dataclasses

import pytest

from flows.artifacts.revocations import check_not_revoked, find_revocation, find_revoked, revoke
from flows.identity.manifest import Manifest
from flows.identity.ref import ArtifactRef
from flows.interop.push import choose
from infra.storage.base import Store
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError
from tests.support.flows.senders import Sink, put_whole, send
from tests.support.flows.shelf import make_manifest, put_run


@pytest.fixture
def chain(source: LocalStore) -> tuple[Manifest, Manifest, Manifest]:
    """A model, what it was made from, and what that was made from: each with its file."""
    tokenizer = put_whole(source, make_manifest("tokenizer", owner="a" * 32))
    base = put_whole(source, make_manifest("pretrain", inputs={"tokenizer": tokenizer}))
    model = put_whole(source, make_manifest("sft", inputs={"pretrain": base}))
    put_run(source, "tiny-1", base, model)
    return tokenizer, base, model


def take_back(store: Store, manifest: Manifest, why: str = "wrong data") -> None:
    revoke(store, manifest, why=why, who="me", when="2026-11-21T06:00:00Z")


def test_what_was_made_from_a_revoked_artifact_is_sent_with_the_revocation(
    source: LocalStore, target: Sink, chain: tuple[Manifest, Manifest, Manifest]
):
    tokenizer, base, model = chain
    take_back(source, tokenizer)
    (named,) = choose(source, ["tiny"]).made_from
    assert str(named).startswith(f"{tokenizer.name}, revoked")
    send(source, target, "tiny")
    for manifest in (base, model):
        (there,) = check_not_revoked(target, manifest)
        assert there == named
    take_back(source, base)
    assert {r.ref.stage for r in choose(source, ["sft@tiny"]).made_from} == {
        "tokenizer",
        "pretrain",
    }


def test_what_was_sent_before_it_was_revoked_is_revoked_there_by_the_next_push(
    source: LocalStore, target: Sink, chain: tuple[Manifest, Manifest, Manifest]
):
    _, base, _ = chain
    send(source, target, "tiny")
    take_back(source, base)
    chosen = choose(source, ["tiny"])
    assert [r.ref.stage for r in chosen.made_from] == ["pretrain"]
    assert base not in chosen.manifests
    send(source, target, "tiny")
    with pytest.raises(ArtifactError, match="wrong data"):
        check_not_revoked(target, base)


def test_a_revocation_there_of_the_same_build_or_of_their_own_one_stays(
    source: LocalStore, target: Sink, chain: tuple[Manifest, Manifest, Manifest]
):
    tokenizer, *_ = chain
    take_back(source, tokenizer)
    take_back(target, tokenizer, why="theirs")
    send(source, target, "tiny")
    found = find_revocation(target, ArtifactRef("tokenizer", tokenizer.fingerprint))
    assert found is not None
    assert found.why == "theirs"

    made = dataclasses.replace(tokenizer.provenance, owner="b" * 32)
    other = put_whole(target, dataclasses.replace(tokenizer, provenance=made))
    take_back(target, other, why="their build")
    send(source, target, "tiny")
    assert "their build" in str(find_revoked(target, other))


def test_a_revocation_there_of_a_build_that_is_no_more_gives_way(
    source: LocalStore, target: Sink, chain: tuple[Manifest, Manifest, Manifest]
):
    tokenizer, _, model = chain
    made = dataclasses.replace(tokenizer.provenance, owner="b" * 32)
    take_back(target, dataclasses.replace(tokenizer, provenance=made), why="earlier build")
    take_back(source, tokenizer)
    send(source, target, "tiny")
    assert ["wrong data" in str(r) for r in check_not_revoked(target, model)] == [True]
