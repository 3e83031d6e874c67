"""Pushing: whole artifacts or none on the other side, nothing sent twice, names that work there."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.artifacts.cache import Cache, fetch
from flows.artifacts.names import open_artifact
from flows.artifacts.pins import find_pin
from flows.artifacts.publish import find_manifest
from flows.artifacts.revocations import check_not_revoked, find_revocation, revoke
from flows.artifacts.runs import find_run, find_tag, point
from flows.identity.manifest import Manifest, digest_of
from flows.identity.redo import find_redo
from flows.identity.ref import ArtifactRef
from flows.interop.push import choose
from infra.storage.base import ObjectNotFound, OnBytes, ignore_bytes
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError
from tests.support.flows.rows import GIGABYTE, publish_files
from tests.support.flows.senders import MODEL, check_same, send
from tests.support.flows.shelf import make_manifest, put_artifact, put_run, put_whole
from tests.support.flows.stores import CountingStore


def test_a_run_arrives_with_all_its_artifacts_and_its_record(source, target, artifacts, tmp_path):
    pushed = send(source, target, "tiny")
    assert len(pushed.items) == 6  # four files and two logs
    for manifest in artifacts:
        check_same(source, target, manifest, tmp_path / "cache")
        assert open_artifact(target, f"{manifest.stage}@tiny") == manifest
    assert target.get("runs/tiny-1.json") == source.get("runs/tiny-1.json")
    assert [*target.list("gc/pins/"), *target.list("refs/")] == []


def test_one_artifact_arrives_with_the_record_that_names_it(source, target, artifacts, tmp_path):
    _, model = artifacts
    point(source, "main", "tiny-1")
    send(source, target, "sft@main")
    check_same(source, target, model, tmp_path / "cache")
    assert open_artifact(target, "sft@main") == open_artifact(target, "sft@tiny") == model
    assert find_manifest(target, ArtifactRef("tokenizer", artifacts[0].fingerprint)) is None
    assert find_tag(target, "main") == "tiny-1"
    assert send(source, target, "main").moved == {}


def test_an_artifact_named_by_its_fingerprint_needs_no_run(source, target, tmp_path):
    model = publish_files(source, "sft", MODEL, tmp_path, run="forgotten")
    name = f"sft/{model.fingerprint[:12]}"
    send(source, target, name)
    assert open_artifact(target, name) == model
    assert list(target.list("runs/")) == []


class Interrupted(CountingStore):
    """Is stopped by Ctrl-C at the fourth file."""

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        if len(self.uploaded) == 3:
            raise KeyboardInterrupt
        super().upload(key, path, on_bytes=on_bytes)


def test_an_interrupted_push_leaves_whole_artifacts_or_none_and_is_resumed(
    source, target, artifacts, tmp_path, monkeypatch
):
    monkeypatch.setattr("flows.artifacts.transfer.THREADS", 1)
    dying = Interrupted(tmp_path / "target")
    with pytest.raises(KeyboardInterrupt):
        send(source, dying, "tiny")
    _, model = artifacts
    assert [find_manifest(target, manifest.ref) for manifest in artifacts] == [None, None]
    assert list(target.list("runs/")) == []
    send(source, target, "tiny")
    assert len(dying.uploaded) == len(target.uploaded) == 3
    assert set(dying.uploaded).isdisjoint(target.uploaded)
    check_same(source, target, model, tmp_path / "cache")


def test_an_object_of_another_size_is_sent_again(source, target, artifacts, tmp_path):
    file = artifacts[1].files[1]
    target.put(file.key, b"half")
    assert send(source, target, "tiny").damaged == 1
    assert file.key in target.uploaded
    check_same(source, target, artifacts[1], tmp_path / "cache")
    # As the hint for a damaged object asks: the manifest is there, and its object was removed.
    target.delete(file.key)
    target.uploaded.clear()
    send(source, target, "tiny")
    assert target.uploaded == [file.key]
    check_same(source, target, artifacts[1], tmp_path / "fresh")


@pytest.mark.parametrize("kind", ["flipped", "shorter", "gone"])
def test_damage_at_the_source_is_found_before_it_is_sent(source, target, artifacts, tmp_path, kind):
    file = artifacts[1].files[1]
    if kind == "gone":
        source.delete(file.key)
    else:
        source.put(file.key, b"\0" * 4999 + (b"\1" if kind == "flipped" else b""))
    with pytest.raises(ArtifactError, match=r"model\.bin of sft/") as caught:
        send(source, target, "tiny")
    assert f"{source.url}/{file.key}" in str(caught.value)
    assert "--force sft" in (caught.value.hint or "")
    assert f"`nanochat push {artifacts[1].name} --to" in (caught.value.hint or "")
    assert find_manifest(target, ArtifactRef("sft", artifacts[1].fingerprint)) is None
    with pytest.raises(ObjectNotFound):
        target.head(file.key)


def test_an_artifact_that_came_first_while_ours_was_sent_keeps_its_place(
    source, artifacts, tmp_path
):
    class Raced(CountingStore):
        """A store in which another process publishes right before our manifest."""

        def put_if_absent(self, key: str, data: bytes) -> bool:
            if key.startswith("sft/"):
                other = LocalStore(tmp_path / "target")
                raced.append(publish_files(other, "sft", MODEL, tmp_path, run="theirs"))
            return super().put_if_absent(key, data)

    raced: list[Manifest] = []
    target = Raced(tmp_path / "target")
    assert send(source, target, "sft@tiny").adopted == tuple(raced)
    assert find_manifest(target, ArtifactRef("sft", artifacts[1].fingerprint)) == raced[0]


def test_files_of_older_artifacts_are_sent_once_and_pinned_until_all_is_there(source, tmp_path):
    pinned: list[tuple[tuple[str, str], ...]] = []

    class Watched(CountingStore):
        def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
            (entry,) = self.list("gc/pins/")
            pinned.append(find_pin(self, entry.key).artifacts)
            super().upload(key, path, on_bytes=on_bytes)

    target = Watched(tmp_path / "target")
    old = publish_files(source, "shards", {"a": b"one", "b": b"two"}, tmp_path)
    new = publish_files(source, "shards", {"b": b"two", "c": b"three"}, tmp_path)
    files = (old.files[1], new.files[1])
    reusing = replace(new, files=files, digest=digest_of(files))
    source.delete(f"shards/{new.fingerprint}/manifest.json")
    put_artifact(source, reusing)
    put_run(source, "tiny-1", reusing)
    send(source, target, "tiny")
    check_same(source, target, reusing, tmp_path / "cache")
    assert find_manifest(target, ArtifactRef("shards", old.fingerprint)) is None
    # The older artifact too: a collection in the target must not delete its files meanwhile.
    assert set(pinned) == {tuple(sorted(("shards", m.fingerprint) for m in (old, new)))}
    assert list(target.list("gc/pins/")) == []
    put_run(source, "old-1", old, name="old")
    send(source, target, "tiny", "old")
    assert sorted(target.uploaded) == sorted(set(target.uploaded))
    with Cache(tmp_path / "cache", GIGABYTE) as cache:
        fetch(target, old, cache)


def test_revoked_and_missing_artifacts_of_a_run_are_left_out_and_named(source, target, artifacts):
    tokenizer, model = artifacts
    put_run(source, "tiny-1", tokenizer, model, status="running", ended=None)
    revoke(source, model, why="wrong data", who="me", when="2026-11-21T06:00:00Z")
    source.delete(f"tokenizer/{tokenizer.fingerprint}/manifest.json")
    chosen = choose(source, ["tiny"])
    assert chosen.manifests == ()
    gone, revoked, running = chosen.left_out
    assert gone == f"tokenizer/{tokenizer.fingerprint[:12]} is not in {source.url}"
    assert revoked.startswith(f"{model.name} was revoked")
    assert "still running" in running
    with pytest.raises(ArtifactError, match="wrong data"):
        choose(source, ["sft@tiny"])


def test_a_record_that_knows_more_is_not_replaced_and_one_that_knows_less_is(
    source, target, artifacts
):
    more = put_run(target, "tiny-1", *artifacts, ended="2026-11-21T09:00:00Z")
    send(source, target, "tiny")
    assert find_run(target, "tiny-1") == more
    put_run(target, "tiny-1", artifacts[0], status="running", ended=None)
    send(source, target, "tiny")
    assert find_run(target, "tiny-1") == find_run(source, "tiny-1")
    resumed = put_run(source, "tiny-1", *artifacts, ended="2026-11-22T09:00:00Z")
    send(source, target, "tiny")
    assert find_run(target, "tiny-1") == resumed


# What was made from a revoked artifact.


@pytest.fixture
def chain(source):
    """A model, what it was made from, and what that was made from: each with its file."""
    tokenizer = put_whole(source, make_manifest("tokenizer", owner="a" * 32))
    base = put_whole(source, make_manifest("pretrain", inputs={"tokenizer": tokenizer}))
    model = put_whole(source, make_manifest("sft", inputs={"pretrain": base}))
    put_run(source, "tiny-1", base, model)
    return tokenizer, base, model


def take_back(store, manifest, why="wrong data"):
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
    _, base, model = chain
    send(source, target, "tiny")
    for manifest, made_from in ((base, ["pretrain"]), (model, [])):
        take_back(source, manifest)
        chosen = choose(source, ["tiny"])
        assert [r.ref.stage for r in chosen.made_from] == made_from
        assert manifest not in chosen.manifests
        send(source, target, "tiny")
        with pytest.raises(ArtifactError, match="wrong data"):
            check_not_revoked(target, manifest)


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
    again = replace(
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
    other = replace(tokenizer.files[0], sha256="0" * 64)
    theirs = replace(tokenizer, files=(other,), digest=digest_of([other]))
    target.put(theirs.ref.manifest_key, theirs.to_json())
    take_back(source, tokenizer)
    send(source, target, "tiny")
    assert find_revocation(target, theirs.ref) is None
