"""`nanochat gc`: its plans, what it deletes, and what it refuses."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.artifacts.pins import SWEEP
from flows.artifacts.runs import find_tag, point
from flows.cli.app import main
from flows.gc.collect import FORMAT, MARK, make_claim
from flows.identity.records import decode_record, encode_record
from flows.leases import held_lease
from tests.support.flows.shelf import make_manifest, put_run, put_whole


def put_old(store, seed, *, days=3.0):
    """Put an artifact that was written some days ago."""
    manifest = put_whole(store, make_manifest("rows", config={"seed": seed}))
    age(store, days=days)
    return manifest


def age(store, *, days):
    """Make every object older."""
    for entry in store.list(""):
        path = Path(store.url.removeprefix("file://")) / entry.key
        os.utime(path, (time.time(), entry.modified - days * 86400))


def age_marks(store, *, days):
    """Have the last collection lie some days back."""
    tree = decode_record(store.get(MARK), format=FORMAT, where=MARK)
    marks = {name: seen - days * 86400 for name, seen in tree["marks"].items()}
    store.put(MARK, encode_record({"marks": marks}, format=FORMAT))


def test_an_empty_store_has_no_garbage(tmp_path, terminal):
    terminal.shows("gc --exit-code")
    assert not (tmp_path / "home" / "store").exists()
    terminal.shows("gc --exit-code --apply")


def test_artifacts_that_go_are_named_as_many_as_one_reads_and_all_to_programs(store, terminal):
    made = [put_old(store, seed) for seed in range(23)]
    terminal.shows("gc --exit-code", code=3)
    tree = terminal.read("gc")
    assert tree["deletes_artifacts"] == []
    rows = {row["fingerprint"]: row["bytes"] for row in tree["waiting_artifacts"]}
    assert list(rows.values()) == sorted(rows.values(), reverse=True)
    assert rows == {
        m.fingerprint: sum(entry.size for entry in store.list(f"{m.ref.prefix}/")) for m in made
    }


def test_a_plan_an_apply_and_a_later_one(store, terminal):
    put_run(store, "tiny-1", kept := put_old(store, 1))
    gone = put_old(store, 2)
    terminal.shows("gc --exit-code", code=3)
    marked = "marked 4 pieces of garbage, 4 of them new; --apply deletes the first of them after 20"
    assert terminal.said("gc", "--exit-code", "--apply")[0].startswith(marked)
    terminal.shows("gc --exit-code")
    age_marks(store, days=1.5)
    terminal.shows("gc --exit-code", code=3)
    terminal.shows("gc --exit-code --apply")
    keys = {entry.key for entry in store.list("rows/")}
    left = {key for key in keys if gone.fingerprint in key}
    assert left == {f"rows/{gone.fingerprint}/lease.json"}
    assert {file.key for file in kept.files} <= keys


def test_a_program_gets_the_same_as_json(store, terminal):
    put_old(store, 2)
    tree = terminal.read("gc")
    assert tree["deletes"] == []
    assert [(row["stage"], row["what"]) for row in tree["waits"]] == [
        ("rows", "artifacts"),
        ("rows", "attempts' files"),
        ("rows", "index entries"),
        ("rows", "attempts' logs"),
    ]
    assert tree["unmarked"] == 4
    assert tree["waits"][0]["seconds_since_written"] == pytest.approx(3 * 86400, abs=60)
    terminal.read("gc", "--apply")
    age_marks(store, days=2)
    tree = terminal.read("gc", "--apply")
    assert tree["deleted"] == tree["deletes"] != []
    assert [row["stage"] for row in tree["deleted_artifacts"]] == ["rows"]
    assert tree["next"] is None


def test_a_run_that_will_be_forgotten_is_announced(store, terminal):
    put_run(store, "tiny-1", put_old(store, 1), status="failed")
    age(store, days=40)
    terminal.shows("gc --exit-code", code=3)
    terminal.shows("gc --exit-code --keep-days 50")


def test_a_record_that_cannot_be_read_ends_it_with_its_name(store, terminal):
    put_old(store, 1)
    store.put("runs/tiny-1.json", b"rotten")
    terminal.refuses("gc --apply")


@pytest.mark.parametrize("before", [None, "tiny-0", "damaged"])
@pytest.mark.parametrize("ending", ["released", "deleted"])
def test_a_tag_waits_for_a_collection_and_checks_that_the_run_exists(
    store, capsys, monkeypatch, ending, before
):
    put_run(store, "tiny-1", put_old(store, 1))
    if before is not None:
        put_run(store, "tiny-0")
        point(store, "main", "tiny-0")
    if before == "damaged":
        store.put("refs/main.json", b"rotten")
    held = held_lease.try_acquire(store, SWEEP, make_claim())
    assert isinstance(held, held_lease.HeldLease)

    def end_collection(seconds):
        if ending == "deleted":
            store.delete("runs/tiny-1.json")
        held.release()

    monkeypatch.setattr("flows.cli.artifacts.tag.time", SimpleNamespace(sleep=end_collection))
    assert main(["tag", "main", "tiny-1"]) == (ending == "deleted")
    printed = capsys.readouterr()
    assert "waiting: garbage is being collected by run gc" in printed.err
    if ending == "released":
        assert f"{'main' if before != 'tiny-0' else 'main: tiny-0'} -> tiny-1" in printed.out
    else:
        assert find_tag(store, "main") == (before if before == "tiny-0" else None)
        assert "error: run tiny-1 was deleted while" in printed.err
