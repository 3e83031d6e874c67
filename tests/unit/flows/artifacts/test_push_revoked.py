"""Who pushes what was made from a revoked artifact is warned, and so is the other side."""

import dataclasses

import pytest

from flows.artifacts.revocations import check_not_revoked, find_revocation, revoke
from flows.identity.manifest import Manifest, digest_of
from flows.identity.redo import find_redo
from flows.identity.ref import ArtifactRef
from flows.interop.push import choose
from infra.storage.base import Store
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError
from tests.support.flows.senders import send
from tests.support.flows.shelf import make_manifest, put_run, put_whole


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


def test_what_was_made_from_a_revoked_artifact_is_sent_with_the_revocation(source, target, chain):
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
    source, target, chain
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


def test_a_revocation_there_stays(source, target, chain):
    tokenizer, *_ = chain
    take_back(source, tokenizer)
    take_back(target, tokenizer, why="theirs")
    send(source, target, "tiny")
    found = find_revocation(target, ArtifactRef("tokenizer", tokenizer.fingerprint))
    assert found.why == "theirs"


def test_what_was_asked_for_again_is_what_plans_find_there_too(source, target, chain):
    base = chain[1]
    identity = base.identity.redone(2)
    again = dataclasses.replace(
        base, fingerprint=identity.fingerprint, preimage=identity.preimage, divergences=()
    )
    put_whole(source, again)
    put_run(source, "tiny-2", again)
    send(source, target, "tiny-2")
    redo = find_redo(target, base.ref)
    assert redo.number == 2
    send(source, target, "tiny-1")
    assert find_redo(target, base.ref) == redo


def test_a_revocation_is_not_of_what_they_made_themselves(source, target, chain):
    tokenizer, *_ = chain
    other = dataclasses.replace(tokenizer.files[0], sha256="0" * 64)
    theirs = dataclasses.replace(tokenizer, files=(other,), digest=digest_of([other]))
    target.put(theirs.ref.manifest_key, theirs.to_json())
    take_back(source, tokenizer)
    send(source, target, "tiny")
    assert find_revocation(target, theirs.ref) is None
