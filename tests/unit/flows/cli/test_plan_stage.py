"""`nanochat plan PROFILE STAGE`: one stage of a plan, and how its artifact came about."""

import json

import pytest

from flows.artifacts.revocations import revoke
from flows.identity.fingerprint import REPOSITORY, Code, identify
from flows.identity.manifest import FORMAT, Manifest
from flows.identity.records import encode_record
from flows.profiles import open_profile
from flows.stages import SHARDS, TOKENIZER
from tests.support.flows.shelf import ACCEPTED, make_manifest, put_artifact

SEGMENTS = [
    {"first_step": 0, "last_step": 3, "started": 0.0, "ended": 65.0, "host": "desk"}
    | {"device": "cpu", "processes": 1, "dollars": 0.5},
    {"first_step": 4, "last_step": 9, "started": 100.0, "ended": 200.0, "host": "rack"}
    | {"device": "cuda", "processes": 8, "dollars": 1.25},
    {"device": "cpu"},
    {"processes": 2},
]
REVOKED = {"why": "test data", "who": "ann@desk", "when": "2026-11-21T07:00:00Z"}


def put_todays(store, stage, *inputs, **facts):
    """Put an artifact that is up to date in tiny by the code as it is."""
    made = make_manifest(stage.name, inputs={source.stage: source for source in inputs})
    digests = {source.stage: source.digest for source in inputs}
    identity = identify(stage, open_profile("tiny").run, digests, code=Code(REPOSITORY))
    tree = json.loads(made.to_json())
    changes = {"fingerprint": identity.fingerprint, "preimage": identity.preimage, **facts}
    changes["provenance"] = tree["provenance"] | facts.get("provenance", {})
    fields = {name: tree[name] for name in tree if name not in ("format", "check")}
    data = encode_record(fields | changes, format=FORMAT)
    return put_artifact(store, Manifest.from_json(data, where="test"))


@pytest.fixture
def shards(store):
    """Today's shards of tiny, which were built in several executions."""
    accepted = {**ACCEPTED, "from": "1" * 64, "earlier": ["2" * 64], "why": "only renamed"}
    made = put_todays(
        store,
        SHARDS,
        provenance={"segments": SEGMENTS, "metrics": {"documents": 7}},
        divergences=["shards/0/manifest.json"],
        accepted=accepted | {"when": "2026-11-21T08:00:00Z", "who": "ann@desk"},
    )
    store.put(f"shards/{made.fingerprint}/divergences/late.json", b"{}")
    return made


def test_a_stage_shows_how_its_artifact_came_about(shards, store, terminal):
    put_todays(store, TOKENIZER, shards)
    terminal.shows("plan tiny shards")
    terminal.shows("plan tiny tokenizer")
    revoke(store, shards, **REVOKED)
    terminal.shows("plan tiny shards")
    terminal.shows("plan tiny tokenizer")


@pytest.mark.usefixtures("shards")
def test_a_stage_for_programs_has_what_the_plan_has_and_the_artifact(terminal):
    for stage in ("shards", "rl"):
        terminal.shows(f"plan tiny {stage} --json --gpus 0 --place threads=2")
