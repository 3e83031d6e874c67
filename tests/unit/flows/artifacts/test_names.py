"""A name is one certain artifact, or an error and a hint of one line each: see the transcripts."""

from pathlib import Path

import pytest

from flows.artifacts.cache import Cache
from flows.artifacts.names import (
    find_directory,
    open_artifact,
    open_model,
    open_run,
    open_usable,
    suggest,
)
from flows.artifacts.revocations import revoke
from flows.artifacts.runs import point
from flows.identity.manifest import Manifest
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, ModelError, NanochatError
from tests.support.flows.shelf import Counting, make_manifest, put_artifact, put_run, two_alike


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "store")


def put(store: LocalStore, stage: str, seed: int = 0) -> Manifest:
    return put_artifact(store, make_manifest(stage, config={"seed": seed}))


@pytest.fixture
def refuses(store, transcript):
    """Compare the error and the hint of names that are refused with the transcript."""

    def compare(*names, ask=open_artifact):
        for name in names:
            transcript.refused(f"{ask.__name__} {name!a}", NanochatError, ask, store, name)

    return compare


# STAGE@NAME.


def test_a_name_whose_artifact_is_gone_stands_for_no_other_model(store, refuses):
    put_run(store, "tiny-1-a", put(store, "sft", 1), put(store, "rl", 1))
    gone = put(store, "rl", 2)
    put_run(store, "tiny-2-a", put(store, "sft", 2), gone)
    point(store, "main", "tiny-2-a")
    store.delete(f"rl/{gone.fingerprint}/manifest.json")
    refuses("tiny", "main", "tiny-2-a", "rl@tiny", "rl@main", "rl@tiny-2-a")
    assert open_artifact(store, "sft@main").stage == "sft"


def test_a_profile_that_ran_with_other_settings_only_is_answered_with_the_names_of_these_runs(
    store, refuses
):
    put_run(store, "tiny-d4-20260101t000000z-0a1b", name="tiny-d4")
    put_run(store, "tiny-1a2b3c-20260101t000000z-0a1b", name="tiny-1a2b3c")
    refuses("tiny", ask=open_run)
    refuses("tiny", "sft@tiny")


def test_an_unknown_artifact_is_answered_with_what_exists(store, refuses):
    refuses("sft@tiny")
    put_run(store, "d12-20260101t000000z-0a1b", name="d12")
    point(store, "main", "d12-20260101t000000z-0a1b")
    refuses("sft@d12", "sft@main", "sft@d13", "sft@mian")


def test_what_cannot_be_a_name_is_refused_without_a_request(store, refuses):
    refuses("sft@", "@tiny", "@", "sft@../x", "sft@a b", "sft@tiny@tiny")
    refuses("sfx@tiny", "sfx/1a2b", "../sft@tiny", "/sft/1a2b", "../../1a2b")
    digits = ("", "1", "abc", "ABCD", "1a2g", "1a2b/", "../1a2b", "1a2b/../../x", "*", "0" * 65)
    refuses(*(f"sft/{text}" for text in digits))
    refuses(*(f"sft/{text}" for text in ("1a2b ", "1a2b\n", "1a2b\0", "\u0661\u0662\u0663\u0664")))
    assert (store.gets, store.lists) == ([], [])


# STAGE/FINGERPRINT.


def test_a_prefix_costs_one_listing_of_what_lies_under_it(store):
    manifest = put(store, "sft")
    store.put(f"sft/{manifest.fingerprint}/files/a/manifest.json", b"a file called so")
    digits = manifest.fingerprint[:4]
    assert open_artifact(store, f"sft/{digits}") == manifest
    assert store.lists == [f"sft/{digits}"]
    assert store.gets == [f"sft/{manifest.fingerprint}/manifest.json"]
    store.lists.clear()
    assert open_artifact(store, f"sft/{manifest.fingerprint}") == manifest
    assert store.lists == []


def test_an_ambiguous_prefix_lists_the_candidates(store, refuses):
    one, other = two_alike("sft", run="tiny-7", created="2026-11-21T09:00:00Z")
    put_artifact(store, one)
    name = f"sft/{one.fingerprint[:4]}"
    store.put(f"sft/{other.fingerprint}/files/a/manifest.json", b"not finished")
    assert open_artifact(store, name) == one
    put_artifact(store, other)
    refuses(name)
    first, second = sorted((one, other), key=lambda manifest: manifest.fingerprint)
    store.put(f"sft/{first.fingerprint}/manifest.json", b"x")
    refuses(name)
    assert open_artifact(store, second.name) == second


def test_an_unknown_prefix_is_answered_with_the_command_that_lists(store, refuses):
    put(store, "sft")
    store.put("sft/0000/manifest.json", b"no fingerprint")
    store.put(f"sft/{'0' * 64}/files/a/data", b"never finished")
    refuses("sft/0000", f"sft/{'0' * 64}")


def test_a_damaged_manifest_is_named(store, refuses):
    manifest = put(store, "sft")
    put_run(store, "tiny-1", manifest)
    store.put(f"sft/{manifest.fingerprint}/manifest.json", b"{}")
    refuses("sft@tiny", "tiny", manifest.name)


# Plain names.


def test_a_plain_name_is_the_furthest_trained_chat_model(store, refuses):
    mid, sft, rl, other = (put(store, s) for s in ("midtrain", "sft", "rl", "pretrain"))
    put_run(store, "tiny-1-a", mid, sft, rl)
    assert open_artifact(store, "tiny") == rl
    put_run(store, "tiny-2-a", mid, sft)
    newer = put(store, "rl", 2)
    assert open_artifact(store, "tiny") == rl
    put_run(store, "tiny-3-a", newer)
    assert open_artifact(store, "tiny") == newer
    point(store, "main", "tiny-2-a")
    assert open_artifact(store, "main") == sft
    put_run(store, "base-1-a", other, name="base")
    refuses("base")


def test_the_newest_run_is_enough_when_it_went_to_the_end(store):
    rl = put(store, "rl")
    for number in range(30):
        put_run(store, f"tiny-{number + 10}-a", rl)
    store.gets.clear()
    assert open_artifact(store, "tiny") == rl
    assert len([key for key in store.gets if key.startswith("runs/tiny-")]) == 1


# Runs.


def test_a_run_is_found_by_every_name_that_leads_to_it(store):
    old, new = put(store, "sft", 1), put(store, "sft", 2)
    first = put_run(store, "tiny-1", old)
    second = put_run(store, "tiny-2", new)
    third = put_run(store, "tiny-3")
    point(store, "main", "tiny-1")
    assert open_run(store, "tiny") == third
    assert open_run(store, "tiny-2") == second
    assert open_run(store, "main") == first
    assert open_run(store, "sft@tiny") == second
    assert open_run(store, old.name) == first


def test_the_run_of_an_artifact_has_to_record_it(store, refuses):
    manifest = put(store, "sft")
    refuses(manifest.name, ask=open_run)
    put_run(store, "tiny-1")
    refuses(manifest.name, ask=open_run)


def test_an_unknown_run_is_answered_with_the_nearest_or_with_what_exists(store, refuses):
    refuses("xyz", "tinny", ask=open_run)
    put_run(store, "best-20260101t000000z-0a1b", name="best")
    put_run(store, "mine-20260101t000000z-0a1b", name="mine")
    refuses("xyz", "tiny", "bset", ask=open_run)
    store.delete("runs/mine-20260101t000000z-0a1b.json")
    refuses("mine", ask=open_run)


# Models.


def test_a_revoked_artifact_is_used_only_by_its_very_fingerprint(store, tmp_path):
    sft = put(store, "sft")
    put_run(store, "tiny-1", sft)
    revoke(store, sft, why="trained on test data", who="ann@desk", when="2026-11-21T07:00:00Z")
    said: list[str] = []
    assert open_artifact(store, "sft@tiny") == sft
    for name in ("tiny", "sft@tiny"):
        with pytest.raises(ArtifactError, match=r"was revoked .* trained on test data"):
            open_usable(store, name, warn=said.append)
        with pytest.raises(ArtifactError, match=r"was revoked .* trained on test data"):
            open_model(store, name, cache=Cache(tmp_path, 1), warn=said.append)
    assert said == []
    assert open_usable(store, sft.name, warn=said.append) == sft
    assert said == [f"{sft.name}, revoked 2026-11-21T07:00:00Z by ann@desk: trained on test data"]


def test_what_was_made_from_a_revoked_artifact_is_used_with_a_warning(store):
    mid = put(store, "midtrain")
    sft = put_artifact(store, make_manifest("sft", inputs={"midtrain": mid}))
    said: list[str] = []
    assert open_usable(store, sft.name, warn=said.append) == sft
    assert said == []
    revoke(store, mid, why="test data", who="ann@desk", when="2026-11-21T07:00:00Z")
    assert open_usable(store, sft.name, warn=said.append) == sft
    assert said == [
        f"{sft.name} was made from {mid.name}, revoked 2026-11-21T07:00:00Z by ann@desk: test data"
    ]


def test_only_models_are_opened_as_such(store, tmp_path):
    put_run(store, "tiny-1", put(store, "tokens"))
    with pytest.raises(ModelError, match="tokens@tiny is not a model"):
        open_model(store, "tokens@tiny", cache=Cache(tmp_path, 1), warn=print)


def test_a_directory_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "sft@tiny", "sft/1a2b", "sft/zz"):
        assert find_directory(name) is None
    for name in ("tiny", "sft/1a2b"):
        (tmp_path / name).mkdir(parents=True)
        assert find_directory(name) == tmp_path / name
    (tmp_path / "file").touch()
    for name in ("./nothing", "some/thing", "~/nothing", "/sft/1a2b", "file"):
        with pytest.raises(ModelError, match="is not a model"):
            find_directory(name)


def test_a_hint_stays_short_however_many_names_there_are():
    assert suggest("tnyi", ["tiny", "d12"]) == "did you mean 'tiny'?"
    assert suggest("xyz", ["tiny", "d12"]) == "one of: tiny, d12"
    # A name of another kind must be nearer: half of "midtrain" is in "main".
    stages = ("stage", ["midtrain"])
    assert suggest("midtrian", ["tiny"], stages) == "did you mean the stage 'midtrain'?"
    assert suggest("main", ["tiny"], stages) == "one of: tiny"
    assert suggest("xyz", [f"run{n}" for n in range(500)]).endswith("run19 and 480 more")
