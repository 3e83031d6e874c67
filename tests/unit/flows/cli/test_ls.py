"""`nanochat ls`: artifacts of a store, of a run, and the files of one."""

from pathlib import Path

import pytest

from flows.artifacts.listing import list_newest
from flows.artifacts.names import open_artifact
from flows.artifacts.revocations import revoke
from flows.artifacts.runs import point, timestamp
from flows.stages import STAGES
from infra.storage.local import LocalStore
from tests.support.flows.rows import publish_files
from tests.support.flows.shelf import (
    ACCEPTED,
    Counting,
    make_manifest,
    put_artifact,
    put_run,
)

STAGES_10 = [stage.name for stage in STAGES][:10]


def put(store, stage, seed=0, **facts):
    return put_artifact(store, make_manifest(stage, config={"seed": seed}, **facts))


def test_a_fresh_home_says_how_to_begin(terminal):
    for words in ("ls", "ls --stage sft", "status", "down", "plan tiny sft"):
        terminal.shows(words)
    assert terminal.read("ls") == []
    assert {stage["state"] for stage in terminal.read("plan", "tiny")["stages"]} == {"+"}


def test_artifacts_are_listed_by_stage_and_the_newest_first(store, terminal):
    put(store, "rl", created="2026-11-21T09:00:00Z")
    sfts = [
        put(store, "sft", n, created=f"2026-11-21T0{n}:00:00Z", files={"model": "x" * 1500})
        for n in range(1, 6)
    ]
    shards = put(store, "shards", created="2026-11-20T00:00:00Z")
    put_run(store, "tiny-1", shards, sfts[0])
    put_run(store, "tiny-2", shards, sfts[3])
    point(store, "main", "tiny-1")
    terminal.shows("ls")
    # The first one's name is main alone: of the runs called tiny a newer one made sft.
    terminal.shows("ls --stage sft --limit 9")
    terminal.shows("ls --limit 1 --json")


def test_what_is_wrong_with_an_artifact_is_in_its_row(store, terminal):
    revoked, damaged, gone = put(store, "sft", 1), put(store, "sft", 2), put(store, "sft", 3)
    accepted = put(store, "rl", accepted={**ACCEPTED, "from": "0" * 64, "why": "renamed"})
    revoke(store, revoked, why="test data", who="ann@desk", when="2026-11-21T07:00:00Z")
    store.put(f"sft/{damaged.fingerprint}/manifest.json", b"x")
    store.delete(f"sft/{gone.fingerprint}/manifest.json")
    terminal.shows("ls --limit 9")
    problems = {
        item["fingerprint"]: item["problem"]
        for item in terminal.read("ls", "--stage", "sft", warns="1 record cannot be read")
    }
    assert "is damaged" in problems.pop(damaged.fingerprint)
    assert problems == {revoked.fingerprint: None, gone.fingerprint: "gone"}

    put_run(store, "tiny-1", gone, accepted)
    terminal.shows("ls tiny")
    assert terminal.read("ls", "tiny")["artifacts"][0]["problem"] == "gone"


def test_a_name_is_shown_at_what_it_stands_for(store, terminal):
    made, failed, hidden = (put(store, "sft", seed) for seed in (1, 2, 3))
    put_run(store, "tiny-1", made)
    put_run(store, "tiny-2", failed, status="failed")
    put_run(store, "main-2", hidden, name="main")
    point(store, "main", "tiny-1")  # a tag hides runs of its name
    terminal.shows("ls")
    assert open_artifact(store, "sft@tiny") == made


def test_a_run_is_listed_in_the_order_of_the_table(store, terminal):
    made = [put(store, stage) for stage in ("rl", "shards", "sft")]
    put_run(store, "tiny-1", *made, status="failed")
    put_run(store, "tiny-2", name="other")
    for words in ("ls tiny-1", "ls tiny --stage sft", "ls tiny-2"):
        terminal.shows(words)
    assert terminal.read("ls", "tiny")["run"]["status"] == "failed"


def test_an_artifact_is_shown_with_its_files_inputs_and_logs(store, terminal):
    mid = put(store, "midtrain")
    sft = put(store, "sft", inputs={"midtrain": mid}, files={"model/w": "x" * 1234, "a.json": "{}"})
    put_run(store, "tiny-1", mid, sft)
    point(store, "main", "tiny-1")
    terminal.shows("ls sft@main")
    terminal.shows(f"ls {sft.name} --json")


def test_report_prints_where_the_report_card_is(store, tmp_path, terminal):
    files = {"report.html": b"<p>", "report.md": b"# Card\n"}
    put_run(store, "tiny-1", publish_files(store, "report", files, tmp_path))
    (line,) = terminal.said("report", "tiny")
    assert Path(line).read_text() == "<p>"
    assert terminal.said("report", "tiny", "--markdown") == ["# Card"]


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store of 200 artifacts, 60 runs and a few tags. Tests only read it."""
    directory = tmp_path_factory.mktemp("large")
    store = LocalStore(directory)
    for number in range(20):
        for stage in STAGES_10:
            put(store, stage, number, created=f"2026-11-21T06:00:{number:02d}Z")
    for number in range(60):
        put_run(store, f"tiny-{timestamp(number).lower().replace('-', '').replace(':', '')}-0a1b")
    for name in ("best", "main"):
        point(store, name, "tiny-19700101t000030z-0a1b")
    return directory


def test_of_many_artifacts_only_those_shown_are_read_eight_at_a_time(filled):
    large = Counting(filled)
    large.meet(8, "manifest.json")
    listing = list_newest(large, count=3)
    assert (len(listing.artifacts), listing.more) == (30, 170)
    assert large.kinds() == {"manifest.json": 30, "revoked.json": 30, "runs": 22, "refs": 2}
    assert sorted(large.lists) == ["index/", "names/", "refs/"]


def test_one_stage_of_many_is_listed_by_itself(filled):
    large = Counting(filled)
    listing = list_newest(large, count=5, stage="sft")
    assert [listed.ref.stage for listed in listing.artifacts] == ["sft"] * 5
    assert (listing.more, large.kinds()["manifest.json"]) == (15, 5)
    assert {"index/sft/", "index/"} & {*large.lists} == {"index/sft/"}
