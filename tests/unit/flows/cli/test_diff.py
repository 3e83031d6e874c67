"""`nanochat diff`: what is different, and why."""

import pytest

from flows.cli.output import age
from flows.identity.manifest import Manifest
from infra.storage.base import Store
from tests.support.flows.shelf import CREATED, make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal

OLD = {
    "config": {"sft": {"num_epochs": 1}},
    "code": {"nanochat_core.train.sft": "1"},
    "files": {"model": "x" * 1500, "config.json": "{}"},
    "metrics": {"bpb": 1.25, "steps": 900, "tasks": {"sums": 0.5}},
    "git_commit": "1" * 40,
}
NEW = {
    "config": {"sft": {"num_epochs": 2}},
    "code": {"nanochat_core.train.sft": "2"},
    "files": {"model": "y" * 1600, "config.json": "{}", "extra": "1"},
    "metrics": {"bpb": 1.0, "steps": 1800, "tasks": {"sums": 0.5}, "kind": "chat"},
    "git_commit": "2" * 40,
}


@pytest.fixture
def pair(store: Store) -> tuple[Manifest, Manifest]:
    """Two runs that trained SFT differently, on different mid models."""
    made: list[Manifest] = []
    for number, facts in enumerate((OLD, NEW), start=1):
        mid = put_artifact(store, make_manifest("midtrain", files={"data": str(number)}))
        if made:  # another fingerprint, as another result has
            mid = put_artifact(
                store, make_manifest("midtrain", config={"n": 2}, files={"data": "2"})
            )
        sft = make_manifest("sft", inputs={"midtrain": mid}, run=f"tiny-{number}", **facts)
        put_artifact(store, sft)
        shards = put_artifact(store, make_manifest("shards"))
        put_run(store, f"tiny-{number}", shards, mid, sft)
        made.append(sft)
    return made[0], made[1]


# Artifacts.


def test_two_artifacts_differ_in_what_they_are_what_they_hold_and_what_was_measured(
    pair: tuple[Manifest, Manifest], terminal: Terminal
):
    old, new = pair
    lines = terminal.said("diff", "sft@tiny-1", new.name)
    assert lines == [
        f"-  {old.name}  made {age(CREATED)} by run tiny-1, commit 111111111111",
        f"+  {new.name}  made {age(CREATED)} by run tiny-2, commit 222222222222",
        "",
        "made from:",
        "  sft.num_epochs 1 -> 2",
        "  code nanochat_core.train.sft changed",
        f"  input midtrain {old.inputs['midtrain'].fingerprint[:12]}"
        f" -> {new.inputs['midtrain'].fingerprint[:12]}",
        "",
        "files:",
        "  extra                   1 bytes  added",
        "  model  1,500 bytes  1,600 bytes  changed",
        "",
        "metrics:",
        "               old    new  difference",
        "  bpb         1.25      1       -0.25",
        "  steps        900  1,800        +900",
        "  tasks.sums   0.5    0.5           0",
        "  kind        none   chat",
    ]


def test_the_difference_is_there_for_programs(pair: tuple[Manifest, Manifest], terminal: Terminal):
    tree = terminal.read("diff", "sft@tiny-1", "sft@tiny-2")
    assert (tree["same"], tree["stage"]) == (False, "sft")
    assert [tree[side]["fingerprint"] for side in ("old", "new")] == [m.fingerprint for m in pair]
    assert tree["changes"][0] == {
        "kind": "config",
        "name": "sft.num_epochs",
        "old": "1",
        "new": "2",
    }
    assert [change["path"] for change in tree["files"]] == ["extra", "model"]
    assert tree["inputs"][0]["new"]["fingerprint"] == pair[1].inputs["midtrain"].fingerprint
    assert tree["metrics"][0] == {"name": "bpb", "old": 1.25, "new": 1.0, "difference": -0.25}


def test_an_artifact_is_the_same_by_every_name(pair: tuple[Manifest, Manifest], terminal: Terminal):
    name = pair[0].name
    code, lines = terminal.run("diff", "sft@tiny-1", name)
    assert (code, lines) == (0, [f"{name} and {name} are the same artifact"])
    tree = terminal.read("diff", "sft@tiny-1", name)
    assert (tree["same"], tree["files"]) == (True, [])


@pytest.mark.usefixtures("pair")
def test_artifacts_of_two_stages_are_not_compared(terminal: Terminal):
    error, hint = terminal.fails("diff", "sft@tiny", "midtrain@tiny")
    assert error == "the artifacts are of different stages: midtrain, sft"
    assert hint == "compare artifacts of one stage, or whole runs"


def test_bytes_that_came_out_alike_are_said_to_be(store: Store, terminal: Terminal):
    one, two = (put_artifact(store, make_manifest("sft", code={"m": c})) for c in "ab")
    lines = terminal.said("diff", one.name, two.name)
    assert lines[-4:] == ["made from:", "  code m changed", "", "files: the same, to the byte"]


def test_an_input_that_was_built_twice_is_reported_by_its_contents(
    store: Store, terminal: Terminal
):
    mids = [make_manifest("midtrain", files={"a": text}) for text in "12"]
    one, two = (put_artifact(store, make_manifest("sft", inputs={"midtrain": mid})) for mid in mids)
    assert terminal.run("diff", one.name, two.name)[1][4] == (
        f"  input midtrain {mids[0].digest[:12]} -> {mids[1].digest[:12]}"
        ", the same work with another result"
    )


# Runs.


def test_two_runs_differ_stage_by_stage(
    pair: tuple[Manifest, Manifest], store: Store, terminal: Terminal
):
    old, new = pair
    rl = put_artifact(store, make_manifest("rl"))
    shards, tokens = (put_artifact(store, make_manifest(name)) for name in ("shards", "tokens"))
    put_run(store, "one", shards, tokens, old, status="failed")
    put_run(store, "two", shards, new, rl, name="best", overrides=("sft.num_epochs=2",))
    lines = terminal.said("diff", "one", "two")
    assert lines == [
        f"-  one  failed    {age(CREATED)}  nanochat run tiny",
        f"+  two  finished  {age(CREATED)}  nanochat run tiny --set sft.num_epochs=2 --name best",
        "",
        f"=  shards  {shards.fingerprint[:12]}",
        f"-  tokens  {tokens.fingerprint[:12]}                  only in the first",
        f"~  sft     {old.fingerprint[:12]} -> {new.fingerprint[:12]}  "
        "sft.num_epochs 1 -> 2, code nanochat_core.train.sft changed, input midtrain changed",
        f"+  rl      {rl.fingerprint[:12]}                  only in the second",
        "",
        "3 of 4 stages differ: tokens, sft, rl",
    ]
    tree = terminal.read("diff", "one", "two")
    assert [(item["stage"], item["state"]) for item in tree["stages"]] == [
        ("shards", "="),
        ("tokens", "-"),
        ("sft", "~"),
        ("rl", "+"),
    ]
    assert tree["new"]["overrides"] == ["sft.num_epochs=2"]


def test_two_runs_of_the_same_are_the_same(
    pair: tuple[Manifest, Manifest], store: Store, terminal: Terminal
):
    put_run(store, "again-1", *pair[:1], name="again")
    put_run(store, "again-2", *pair[:1], name="again")
    code, lines = terminal.run("diff", "again-1", "again")
    assert (code, lines[-1]) == (0, "no stage differs")
    put_run(store, "idle", name="idle")
    assert terminal.run("diff", "idle", "idle")[1][-1] == "neither has made anything yet"


def test_an_unknown_reason_is_said_to_be_unknown(
    pair: tuple[Manifest, Manifest], store: Store, terminal: Terminal
):
    old, _ = pair
    key = f"sft/{old.fingerprint}/manifest.json"
    store.delete(key)
    assert f"{old.name} is gone" in "\n".join(terminal.run("diff", "tiny-1", "tiny-2")[1])
    store.put(key, b"x")
    assert f"{key} is damaged" in "\n".join(terminal.run("diff", "tiny-1", "tiny-2")[1])
