"""`nanochat gc` as a person meets it."""

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.artifacts.pins import SWEEP
from flows.artifacts.runs import find_tag, point
from flows.cli.app import main
from flows.gc.collect import FORMAT, MARK, make_claim
from flows.identity.manifest import Manifest
from flows.identity.records import encode_record, find_document
from flows.leases import held_lease
from infra.storage.local import LocalStore
from tests.support.flows.shelf import make_manifest, put_artifact, put_run


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def put_old(store: LocalStore, seed: int, *, days: float) -> Manifest:
    """An artifact that was written some days ago."""
    manifest = make_manifest("rows", config={"seed": seed})
    for file in (*manifest.files, *manifest.logs):
        store.put(file.key, b"x" * file.size)
    put_artifact(store, manifest)
    age(store, days=days)
    return manifest


def age(store: LocalStore, *, days: float) -> None:
    """Let all that there is be older."""
    for entry in store.list(""):
        path = Path(store.url.removeprefix("file://")) / entry.key
        os.utime(path, (time.time(), entry.modified - days * 86400))


def age_marks(store: LocalStore, *, days: float) -> None:
    """As if the last collection had been some days ago."""
    tree = find_document(store, MARK, format=FORMAT)
    assert tree is not None
    marks = {name: seen - days * 86400 for name, seen in tree["marks"].items()}
    store.put(MARK, encode_record({"marks": marks}, format=FORMAT))


def gc(tmp_path: Path, *words: str) -> int:
    """Collect, or plan to; with 3 the command says that a plan has something to do."""
    place = ("--home", f"{tmp_path}/home", "--store", f"file://{tmp_path}/store")
    return main(["gc", "--exit-code", *words, *place])


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, spaces once."""
    return " ".join(capsys.readouterr().out.split())


def test_an_empty_store_has_no_garbage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gc(tmp_path) == 0
    assert printed(capsys) == "no garbage; in use: 0 artifacts, 0 objects, 0 bytes"
    assert not (tmp_path / "store").exists()
    assert gc(tmp_path, "--apply") == 0
    assert printed(capsys).startswith("nothing was marked, nothing was deleted no garbage;")


def test_artifacts_that_go_are_named_as_many_as_one_reads_and_all_to_programs(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    made = [put_old(store, seed, days=3) for seed in range(23)]
    assert gc(tmp_path) == 3
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    named = [line for line in lines if line.startswith("rows/")]
    assert len(named) == 20
    assert all(re.fullmatch(r"rows/\w{12} [\d.,]+ \w+ \d+ days ago", line) for line in named)
    assert "and 3 more artifacts; --json has all" in lines

    assert gc(tmp_path, "--json") == 3
    tree = json.loads(capsys.readouterr().out)
    assert tree["deletes_artifacts"] == []
    told = {row["fingerprint"]: row for row in tree["waiting_artifacts"]}
    assert sorted(told) == sorted(manifest.fingerprint for manifest in made)
    largest = list(told)[:20]
    assert [line.split()[0] for line in named] == [f"rows/{name[:12]}" for name in largest]
    assert told[largest[0]]["bytes"] >= told[largest[-1]]["bytes"]
    for row in told.values():
        place = f"rows/{row['fingerprint']}/"
        assert row["bytes"] == sum(entry.size for entry in store.list(place))


def test_a_plan_an_apply_and_a_later_one(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    put_run(store, "tiny-1", kept := put_old(store, 1, days=3))
    gone = put_old(store, 2, days=3)

    assert gc(tmp_path) == 3
    out = printed(capsys)
    assert "garbage that has to wait (0 marked already, --apply marks the rest):" in out
    assert "rows artifacts 1 1" in out
    assert "rows attempts' files 1 1 1 bytes 3 days ago" in out
    assert "in use: 1 artifacts, 6 objects" in out

    assert gc(tmp_path, "--apply") == 0
    assert (
        "marked 4 pieces of garbage, 4 of them new; --apply deletes the first of them after 20"
        in (printed(capsys))
    )
    assert gc(tmp_path) == 0
    assert "(4 marked already, --apply marks the rest)" in printed(capsys)

    age_marks(store, days=1.5)
    assert gc(tmp_path, "--plan") == 3
    assert "garbage that --apply deletes: " in printed(capsys)
    assert gc(tmp_path, "--apply") == 0
    out = printed(capsys)
    assert out.startswith("deleted: stage what number objects size last written rows artifacts 1 1")
    assert "in 4 objects" in out
    keys = {entry.key for entry in store.list("rows/")}
    assert {key for key in keys if gone.fingerprint in key} == {
        f"rows/{gone.fingerprint}/lease.json"
    }
    assert {file.key for file in kept.files} <= keys


def test_a_program_gets_the_same_as_json(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    put_old(store, 2, days=3)

    def told(*words: str) -> dict[str, Any]:
        gc(tmp_path, "--json", *words)
        return json.loads(capsys.readouterr().out)

    tree = told()
    assert tree["deletes"] == []
    assert [(row["stage"], row["what"]) for row in tree["waits"]] == [
        ("rows", "artifacts"),
        ("rows", "attempts' files"),
        ("rows", "index entries"),
        ("rows", "attempts' logs"),
    ]
    assert tree["unmarked"] == 4
    assert tree["waits"][0]["seconds_since_written"] == pytest.approx(3 * 86400, abs=60)
    told("--apply")
    age_marks(store, days=2)
    tree = told("--apply")
    assert tree["deleted"] == tree["deletes"] != []
    assert [row["stage"] for row in tree["deleted_artifacts"]] == ["rows"]
    assert tree["next"] is None


def test_a_run_that_will_be_forgotten_is_announced(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    put_run(store, "tiny-1", put_old(store, 1, days=3), status="failed")
    age(store, days=40)
    assert gc(tmp_path) == 3
    out = printed(capsys)
    assert "records of runs 1 1" in out
    assert "Runs not heard of for 30 days are forgotten, and what only they reach goes" in out
    assert gc(tmp_path, "--keep-days", "50") == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--plan", "--apply"), 1, "--plan and --apply are both given"),
        (("--keep-days", "0"), 2, "--keep-days is 0"),
        (("--grace-hours", "-1"), 2, "--grace-hours is -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    message: str,
):
    assert gc(tmp_path, *words) == code
    assert message in capsys.readouterr().err


def test_a_record_that_cannot_be_read_ends_it_with_its_name(
    store: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    put_old(store, 1, days=3)
    store.put("runs/tiny-1.json", b"rotten")
    assert gc(tmp_path, "--apply") == 1
    said = capsys.readouterr().err
    assert "garbage cannot be distinguished from what is in use" in said
    assert "runs/tiny-1.json" in said
    assert "hint: nothing was deleted" in said
    assert "delete" not in said.partition("on another machine")[0].partition("was deleted")[2]
    assert "delete it" in said.partition("on another machine")[2]


@pytest.mark.parametrize("before", [None, "tiny-0", "damaged"])
@pytest.mark.parametrize("ending", ["released", "deleted", "interrupted"])
def test_a_tag_waits_for_a_collection_and_looks_whether_the_run_is_there(
    store: LocalStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
    before: str | None,
):
    put_run(store, "tiny-1", put_old(store, 1, days=3))
    if before is not None:
        put_run(store, "tiny-0")
        point(store, "main", "tiny-0")
    if before == "damaged":
        store.put("refs/main.json", b"rotten")
    held = held_lease.try_acquire(store, SWEEP, make_claim())
    assert isinstance(held, held_lease.HeldLease)

    def end_collection(seconds: float) -> None:
        if ending == "interrupted":
            raise KeyboardInterrupt
        if ending == "deleted":
            store.delete("runs/tiny-1.json")
        held.release()

    monkeypatch.setattr("flows.cli.artifacts.tag.time", SimpleNamespace(sleep=end_collection))
    where = ["--home", str(tmp_path / "home"), "--store", store.url]
    assert main(["tag", "main", "tiny-1", *where]) == {"released": 0, "deleted": 1}.get(ending, 130)
    said = capsys.readouterr()
    assert "waiting: garbage is being collected by run gc" in said.err
    if ending == "released":
        assert f"{'main' if before != 'tiny-0' else 'main: tiny-0'} -> tiny-1" in said.out
    else:
        assert find_tag(store, "main") == (before if before == "tiny-0" else None)
        assert ("error: run tiny-1 was deleted while" in said.err) == (ending == "deleted")
