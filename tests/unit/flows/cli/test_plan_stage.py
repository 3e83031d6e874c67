"""`nanochat plan PROFILE STAGE`: one stage of a plan, and how its artifact came about."""

import json
from typing import Any

import pytest

from flows.artifacts.revocations import revoke
from flows.cli.output import age
from flows.identity.fingerprint import REPOSITORY, Code, identify
from flows.identity.manifest import Manifest
from flows.profiles import open_profile
from flows.stages import SHARDS, TOKENIZER, Stage
from infra.storage.base import Store
from tests.support.flows.shelf import ACCEPTED, CREATED, make_manifest, put_artifact
from tests.support.flows.terminal import Terminal


def put_todays(store: Store, stage: Stage, *inputs: Manifest, **facts: Any) -> Manifest:
    """An artifact that is up to date in tiny by the code as it is."""
    made = make_manifest(stage.name, inputs={source.stage: source for source in inputs})
    digests = {source.stage: source.digest for source in inputs}
    identity = identify(stage, open_profile("tiny").run, digests, code=Code(REPOSITORY))
    tree: dict[str, Any] = json.loads(made.to_json())
    changes = {"fingerprint": identity.fingerprint, "preimage": identity.preimage, **facts}
    changes["provenance"] = tree["provenance"] | facts.get("provenance", {})
    fields = {name: tree[name] for name in tree if name not in ("format", "check")}
    return put_artifact(store, Manifest.from_tree(fields | changes, where="test"))


@pytest.fixture
def built(store: Store) -> Manifest:
    """Today's shards of tiny, which were built in two executions."""
    segments = (
        {"first_step": 0, "last_step": 3, "started": 0.0, "ended": 65.0, "host": "desk"}
        | {"device": "cpu", "processes": 1, "dollars": 0.5},
        {"first_step": 4, "last_step": 9, "started": 100.0, "ended": 200.0, "host": "rack"}
        | {"device": "cuda", "processes": 8, "dollars": 1.25},
    )
    accepted = {**ACCEPTED, "from": "1" * 64, "earlier": ["2" * 64], "why": "only renamed"}
    built = put_todays(
        store,
        SHARDS,
        provenance={"segments": list(segments), "metrics": {"documents": 7}},
        divergences=["shards/0/manifest.json"],
        accepted=accepted | {"when": "2026-11-21T08:00:00Z", "who": "ann@desk"},
    )
    store.put(f"shards/{built.fingerprint}/divergences/late.json", b"{}")
    return built


def test_a_stage_shows_how_its_artifact_came_about(
    built: Manifest, store: Store, terminal: Terminal
):
    lines = terminal.said("plan", "tiny", "shards")
    assert lines[0] == "shards: makes parquet files of documents, the last one for validation"
    assert f"  fingerprint  {built.fingerprint}" in lines
    here = lines.index(f"artifact {built.name}:")
    assert [" ".join(line.split()) for line in lines[here + 1 :]] == [
        f"accepted {age('2026-11-21T08:00:00Z')} by ann@desk: only renamed",
        "the bytes of shards/111111111111, shards/222222222222; unproven",
        f"made {age(CREATED)} by run tiny-1",
        f"digest {built.digest[:12]}",
        "diverged another result of the same work: shards/0/manifest.json",
        "diverged another result of the same work: "
        f"shards/{built.fingerprint}/divergences/late.json",
        "metric documents = 7",
        "execution steps 0 to 3, 1 process on cpu of desk, 1 min 5 s, $0.50",
        "execution steps 4 to 9, 8 processes on cuda of rack, 1 min 40 s, $1.25",
        "file data (1 bytes)",
    ]


def test_a_stage_leaves_out_what_is_not_known_of_an_execution(store: Store, terminal: Terminal):
    segments = [{"device": "cpu"}, {"processes": 2}]
    put_todays(store, SHARDS, provenance={"segments": segments})
    said = [" ".join(line.split()) for line in terminal.said("plan", "tiny", "shards")]
    assert "execution 1 process on cpu" in said
    assert "execution 2 processes" in said


def test_a_stage_says_that_its_artifact_was_revoked(
    built: Manifest, store: Store, terminal: Terminal
):
    revoke(store, built, why="test data", who="ann@desk", when="2026-11-21T07:00:00Z")
    said = "\n".join(terminal.said("plan", "tiny", "shards"))
    assert "x revoked" in said
    assert f"revoked    {age('2026-11-21T07:00:00Z')} by ann@desk: test data" in said


def test_a_stage_names_revoked_artifacts_that_its_result_stands_on(
    store: Store, terminal: Terminal
):
    shards = put_todays(store, SHARDS)
    put_todays(store, TOKENIZER, shards)
    assert "revoked" not in "\n".join(terminal.said("plan", "tiny", "tokenizer"))
    revoke(store, shards, why="test data", who="ann@desk", when="2026-11-21T07:00:00Z")
    assert (
        f"  made from  {shards.name}, revoked 2026-11-21T07:00:00Z by ann@desk: test data"
        in terminal.said("plan", "tiny", "tokenizer")
    )


def test_a_stage_for_programs_has_what_the_plan_has_and_the_artifact(
    built: Manifest, terminal: Terminal
):
    tree = terminal.read("plan", "tiny", "shards")
    assert (tree["stage"], tree["state"], tree["fingerprint"]) == ("shards", "=", built.fingerprint)
    assert tree["artifact"]["segments"][1]["processes"] == 8
    assert tree["artifact"]["accepted"]["why"] == "only renamed"
    assert len(tree["artifact"]["divergences"]) == 2
    assert tree["artifact"]["files"][0]["path"] == "data"
    tree = terminal.read("plan", "tiny", "rl")
    assert (tree["state"], tree["artifact"]) == ("+", None)
    assert tree["inputs"] == ["sft", "task_data"]
