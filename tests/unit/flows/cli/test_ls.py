"""`nanochat ls`: artifacts of a store, of a run, and the files of one."""

from pathlib import Path
from typing import Any

import pytest

from flows.artifacts.listing import list_newest
from flows.artifacts.names import open_artifact
from flows.artifacts.revocations import revoke
from flows.artifacts.runs import point, timestamp
from flows.cli.output import age
from flows.stages import STAGES
from infra.storage.base import Store
from infra.storage.local import LocalStore
from tests.support.flows.shelf import (
    ACCEPTED,
    CREATED,
    Counting,
    fill,
    make_manifest,
    put_artifact,
    put_run,
)
from tests.support.flows.terminal import Terminal

STAGES_10 = [stage.name for stage in STAGES][:10]


def put(store: Store, stage: str, seed: int = 0, **facts: Any):
    return put_artifact(store, make_manifest(stage, config={"seed": seed}, **facts))


def test_an_empty_store_says_how_to_begin(store: Store, terminal: Terminal):
    assert terminal.said("ls") == [f"no artifacts in {store.url}: nanochat run tiny"]
    assert terminal.said("ls", "--stage", "sft") == [
        f"no artifacts of sft in {store.url}: nanochat run tiny"
    ]
    assert terminal.said("ls", "--json") == ["[]"]


def test_artifacts_are_listed_by_stage_and_the_newest_first(store: Store, terminal: Terminal):
    rl = put(store, "rl", created="2026-11-21T09:00:00Z")
    sfts = [
        put(store, "sft", n, created=f"2026-11-21T0{n}:00:00Z", files={"model": "x" * 1500})
        for n in range(1, 6)
    ]
    shards = put(store, "shards", created="2026-11-20T00:00:00Z")
    put_run(store, "tiny-1", shards, sfts[0])
    put_run(store, "tiny-2", shards, sfts[3])
    point(store, "main", "tiny-1")

    head, *rows, _, more = terminal.said("ls")
    assert head.split() == ["stage", "fingerprint", "made", "run", "size", "names"]
    shown = [shards, *sfts[:1:-1], rl]
    assert [row.split()[:2] for row in rows] == [m.name.split("/") for m in shown]
    assert rows[0].endswith("main, tiny")
    assert rows[1].split()[2:] == [*age("2026-11-21T05:00:00Z").split(), "tiny-1", "1.5", "kB"]
    assert rows[2].split()[-1] == "tiny"
    assert more == "2 older ones; --limit and --stage show more"

    assert [
        row.split()[1] for row in terminal.said("ls", "--stage", "sft", "--limit", "9")[1:]
    ] == [m.name.split("/")[1] for m in sfts[::-1]]
    tree = terminal.read("ls", "--limit", "9")
    assert [item["names"] for item in tree if item["fingerprint"] == sfts[0].fingerprint] == [
        ["main"]  # of the runs called tiny a newer one made sft
    ]
    assert [item["fingerprint"] for item in tree if item["stage"] == "sft"] == [
        m.fingerprint for m in sfts[::-1]
    ]
    assert tree[0] == {
        "stage": "shards",
        "fingerprint": shards.fingerprint,
        "created": "2026-11-20T00:00:00Z",
        "run": "tiny-1",
        "files": 1,
        "bytes": 1,
        "names": ["main", "tiny"],
        "revoked": None,
        "accepted": None,
        "problem": None,
    }


def test_what_is_wrong_with_an_artifact_is_in_its_row(store: Store, terminal: Terminal):
    revoked, damaged, gone = put(store, "sft", 1), put(store, "sft", 2), put(store, "sft", 3)
    accepted = put(store, "rl", accepted={**ACCEPTED, "from": "0" * 64, "why": "renamed"})
    revoke(store, revoked, why="test data", who="ann@desk", when="2026-11-21T07:00:00Z")
    store.put(f"sft/{damaged.fingerprint}/manifest.json", b"x")
    store.delete(f"sft/{gone.fingerprint}/manifest.json")

    why = f"1 record cannot be read: {store.url}/sft/{damaged.fingerprint}/manifest.json is damaged"
    rows = {row.split()[1]: row for row in terminal.said("ls", "--limit", "9", warns=why)[1:]}
    assert rows.keys() == {m.name.split("/")[1] for m in (revoked, damaged, accepted)}
    assert rows[revoked.name.split("/")[1]].endswith("revoked: test data")
    assert rows[damaged.name.split("/")[1]].endswith("damaged")
    assert rows[accepted.name.split("/")[1]].endswith("accepted")
    problems = {
        item["fingerprint"]: item["problem"]
        for item in terminal.read("ls", "--stage", "sft", warns=why)
    }
    assert problems[revoked.fingerprint] is None
    assert "is damaged" in problems[damaged.fingerprint]

    put_run(store, "tiny-1", gone, accepted)
    head, _, *rows = terminal.said("ls", "tiny")
    assert head.startswith("run tiny-1: finished, started ")
    assert [row.split()[:2] for row in rows] == [m.name.split("/") for m in (gone, accepted)]
    assert rows[0].endswith("gone")
    assert terminal.read("ls", "tiny")["artifacts"][0]["problem"] == "gone"


def test_entries_of_the_index_that_lead_nowhere_do_not_hide_artifacts(
    store: Store, terminal: Terminal
):
    kept = put(store, "sft", created="2026-01-01T00:00:00Z")
    for number in range(8):
        store.put(f"index/sft/20300101t000000z-{number:064d}", b"")
    assert [row.split()[1] for row in terminal.said("ls")[1:2]] == [kept.name.split("/")[1]]


def test_a_tag_hides_runs_of_its_name(store: Store, terminal: Terminal):
    old, new = put(store, "sft", 1), put(store, "sft", 2)
    put_run(store, "tiny-1", old)
    put_run(store, "main-2", new, name="main")
    point(store, "main", "tiny-1")
    names = {item["fingerprint"]: item["names"] for item in terminal.read("ls")}
    assert names == {old.fingerprint: ["main", "tiny"], new.fingerprint: []}


def test_a_name_is_shown_at_what_it_stands_for(store: Store, terminal: Terminal):
    made, failed = put(store, "sft", 1), put(store, "sft", 2)
    put_run(store, "tiny-1", made)
    put_run(store, "tiny-2", failed, status="failed")
    names = {item["fingerprint"]: item["names"] for item in terminal.read("ls")}
    assert names == {made.fingerprint: ["tiny"], failed.fingerprint: []}
    assert open_artifact(store, "sft@tiny") == made


def test_a_run_is_listed_in_the_order_of_the_table(store: Store, terminal: Terminal):
    made = [put(store, stage) for stage in ("rl", "shards", "sft")]
    put_run(store, "tiny-1", *made, status="failed")
    put_run(store, "tiny-2", name="other")
    assert [row.split()[0] for row in terminal.said("ls", "tiny-1")[2:]] == ["shards", "sft", "rl"]
    assert [row.split()[0] for row in terminal.said("ls", "tiny", "--stage", "sft")[2:]] == ["sft"]
    assert terminal.said("ls", "tiny-2")[1] == "no artifacts yet"
    assert terminal.read("ls", "tiny")["run"]["status"] == "failed"


def test_an_artifact_is_shown_with_its_files_inputs_and_logs(store: Store, terminal: Terminal):
    mid = put(store, "midtrain")
    sft = put(store, "sft", inputs={"midtrain": mid}, files={"model/w": "x" * 1234, "a.json": "{}"})
    put_run(store, "tiny-1", mid, sft)
    point(store, "main", "tiny-1")
    text = "\n".join(terminal.said("ls", "sft@main"))
    assert text.startswith(f"{sft.name}: made {age(CREATED)} by run tiny-1\n")
    for line in (
        f"  fingerprint  {sft.fingerprint}",
        f"  url          {store.url}/sft/{sft.fingerprint}",
        "  names        sft@main, sft@tiny",
        "2 files, 1,236 bytes:",
        f"  model/w  1,234  {sft.files[1].sha256[:12]}",
        f"  {mid.name}",
        f"  events.jsonl  2  {sft.logs[0].sha256[:12]}",
    ):
        assert line in text.splitlines()
    tree = terminal.read("ls", sft.name)
    assert tree["files"][1]["sha256"] == sft.files[1].sha256
    assert tree["inputs"]["midtrain"]["fingerprint"] == mid.fingerprint
    assert tree["url"] == f"{store.url}/sft/{sft.fingerprint}"


def test_what_others_wrote_cannot_move_the_cursor(store: Store, terminal: Terminal):
    evil = "tiny\x1b[2J\x07\u202e"
    one = put(store, "sft", 1, run=evil, files={"data": "1"}, metrics={evil: evil, "n": 1})
    two = put(store, "sft", 2, run=evil, files={"data": "2"}, metrics={evil: 2, "n": 2})
    put_run(store, "tiny-1", one)
    put_run(store, "tiny-2", two, overrides=(evil,))
    point(store, "main", "tiny-1")
    for words in (
        *("ls", "ls tiny", "ls sft@tiny", "tag", "tag main", "compare tiny-1 tiny-2"),
        f"compare {one.name} {two.name}",
    ):
        text = "\n".join(terminal.run(*words.split())[1])
        assert "tiny" in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    point(store, "main", f"tiny-9{evil}")
    for words in ("ls main", f"tag best {one.name}"):
        assert "\x1b" not in "".join(terminal.fails(*words.split()))


# What a look costs.


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 500 artifacts, 60 runs and a few tags. Tests only look at it."""
    directory = tmp_path_factory.mktemp("large")
    fill(directory, STAGES_10, each=50)
    store = LocalStore(directory)
    for number in range(60):
        put_run(store, f"tiny-{timestamp(number).lower().replace('-', '').replace(':', '')}-0a1b")
    for name in ("best", "main"):
        point(store, name, "tiny-19700101t000030z-0a1b")
    return directory


@pytest.fixture
def large(filled: Path) -> Counting:
    """That store, by which requests are counted."""
    return Counting(filled)


def test_of_many_artifacts_only_those_shown_are_read(large: Counting):
    large.meet(8, "manifest.json")
    listing = list_newest(large, count=3)
    assert len(listing.artifacts) == 30
    assert listing.more == 470
    assert large.kinds() == {"manifest.json": 30, "revoked.json": 30, "runs": 22, "refs": 2}
    assert sorted(large.lists) == ["index/", "names/", "refs/"]
    assert large.most_at_once == 8


def test_one_stage_of_many_is_listed_by_itself(large: Counting):
    listing = list_newest(large, count=5, stage="sft")
    assert [listed.ref.stage for listed in listing.artifacts] == ["sft"] * 5
    assert listing.more == 45
    assert large.kinds()["manifest.json"] == 5
    assert "index/sft/" in large.lists
    assert "index/" not in large.lists


def test_everything_is_read_when_everything_is_asked_for(large: Counting):
    large.meet(8, "manifest.json")
    listing = list_newest(large, count=100)
    assert (len(listing.artifacts), listing.more) == (500, 0)
    assert large.most_at_once == 8
