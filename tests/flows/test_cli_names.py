"""`ls`, `tag`, `diff` and `explain`: what a person sees of a store that has something in it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.revocation import revoke
from flows.runs import find_tag, point
from infra.storage.base import Store
from infra.storage.open import open_store
from tests.flows.shelf import make_manifest, put_artifact, put_run, two_alike

Say = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The default store of a fresh home."""
    monkeypatch.setenv("NANOCHAT_HOME", str(tmp_path / "home"))
    for name in ("NANOCHAT_STORE", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return open_store((tmp_path / "home" / "store").as_uri())


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command; returns its exit code and the lines it printed."""

    def run(*words: str) -> tuple[int, list[str]]:
        code = main(words)
        captured = capsys.readouterr()
        assert captured.err == ""
        return code, captured.out.splitlines()

    return run


@pytest.fixture
def said(say: Say) -> Callable[..., list[str]]:
    """The lines of a command that works."""

    def run(*words: str) -> list[str]:
        code, lines = say(*words)
        assert code == 0
        return lines

    return run


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command prints for programs."""

    def run(*words: str) -> Any:
        assert main([*words, "--json"]) in (0, 2)
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def fails(store: Store, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run a command that must fail; returns the texts after `error:` and `hint:`."""

    def run(*words: str) -> tuple[str, str]:
        assert main(words) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        error, hint = captured.err.splitlines()
        return error.removeprefix("error: "), hint.removeprefix("hint: ")

    return run


def put(store: Store, stage: str, seed: int = 0, **facts: Any):
    return put_artifact(store, make_manifest(stage, config={"seed": seed}, **facts))


# Mistakes.


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ("ls tnyi", "there is no run 'tnyi' in", "did you mean 'tiny'?"),
        ("ls tiny", "tiny was never run in", "nanochat run tiny"),
        ("ls sft@tiny", "there is no sft@tiny in", "make one: nanochat run tiny"),
        ("ls sft/1a2b", "there is no artifact sft/1a2b in", "nanochat ls --stage sft"),
        ("ls sft/1a", "'1a' is not the beginning of a fingerprint", "4 digits or more"),
        ("ls sfx/1a2b", "there is no stage 'sfx'", "did you mean 'sft'?"),
        ("ls ..", "'..' cannot be the name of a run or a tag", "names in it are letters"),
        ("ls sft@../../x", "'../../x' cannot be the name of a run or a tag", "letters"),
        ("ls ../sft", "there is no stage '..'", "one of: shards"),
        ("ls --stage sfx", "there is no stage 'sfx'", "did you mean 'sft'?"),
        ("ls --limit 0", "--limit is 0", "give 1 or more"),
        ("ls sft@tiny --stage sft", "--stage sft is given with the artifact", "leave it out"),
        ("tag main", "there is no tag main in", "make it: nanochat tag main RUN"),
        ("tag main tnyi", "there is no run 'tnyi' in", "did you mean 'tiny'?"),
        ("tag main sft@tiny", "there is no sft@tiny in", "nanochat run tiny"),
        ("tag tiny d12", "tiny is the name of a profile", "choose another name"),
        ("tag sft d12", "sft is the name of a stage", "choose another name"),
        ("tag a/b tiny", "'a/b' cannot be the name", "short word"),
        ("tag -- -x tiny", "'-x' cannot be the name", "letters"),
        ("tag --delete", "--delete takes one tag", "nanochat tag --delete NAME"),
        ("tag --delete main tiny", "--delete takes one tag", "nanochat tag --delete NAME"),
        ("tag --delete main", "there is no tag main in", "make it"),
        ("tag --delete ../x", "'../x' cannot be the name", "letters"),
        ("diff sft@tiny", "diff needs B", "see `nanochat diff --help`"),
        ("diff tiny sft@tiny", "tiny is a run and sft@tiny is an artifact", "like sft@tiny"),
        ("diff sft/1a2b tiny", "tiny is a run and sft/1a2b is an artifact", "like sft@tiny"),
        ("diff sft@tiny sft@d12", "there is no sft@", "nanochat run"),
        ("diff tiny d12", "tiny was never run in", "nanochat run tiny"),
        ("explain tiny sfx", "there is no stage 'sfx'", "did you mean 'sft'?"),
        ("explain sft@tiny", "explain needs STAGE", "see `nanochat explain --help`"),
    ],
)
def test_a_mistake_is_answered_in_two_lines(
    words: str, error: str, hint: str, fails: Callable[..., tuple[str, str]]
):
    found = fails(*words.split())
    assert found[0].startswith(error)
    assert hint in found[1]


@pytest.mark.parametrize("words", ["ls", "tag", "ls tiny", "diff sft@a sft@b", "tag main tiny"])
def test_a_store_that_is_not_there_is_an_error_and_not_an_empty_one(
    words: str, fails: Callable[..., tuple[str, str]]
):
    assert "cannot be reached" in fails(*words.split(), "--store", "file:///not/mounted/store")[0]


def test_a_damaged_record_is_named(store: Store, fails: Callable[..., tuple[str, str]]):
    store.put("runs/tiny-1.json", b"x")
    store.put("refs/main.json", b"x")
    sft = put(store, "sft")
    put_run(store, "d12-1", sft, name="d12")
    store.put(f"sft/{sft.fingerprint}/manifest.json", b"x")
    for words, key in (
        ("ls tiny-1", "runs/tiny-1.json"),
        ("ls tiny", "runs/tiny-1.json"),
        ("ls main", "refs/main.json"),
        ("ls sft@main", "refs/main.json"),
        ("ls sft@d12", "manifest.json"),
        ("tag best tiny-1", "runs/tiny-1.json"),
        ("diff tiny-1 d12-1", "runs/tiny-1.json"),
        (f"diff sft@d12 {sft.name}", "manifest.json"),
    ):
        error, hint = fails(*words.split())
        assert f"{store.url}/" in error
        assert key in error
        assert hint


# ls.


def test_an_empty_store_says_how_to_begin(store: Store, said: Callable[..., list[str]]):
    assert said("ls") == [f"no artifacts in {store.url}: nanochat run tiny"]
    assert said("ls", "--stage", "sft") == [
        f"no artifacts of sft in {store.url}: nanochat run tiny"
    ]
    assert said("ls", "--json") == ["[]"]


def test_artifacts_are_listed_by_stage_and_the_newest_first(
    store: Store, said: Callable[..., list[str]], read: Callable[..., Any]
):
    rl = put(store, "rl", created="2026-11-21T09:00:00Z")
    sfts = [
        put(store, "sft", n, created=f"2026-11-21T0{n}:00:00Z", files={"model": "x" * 1500})
        for n in range(1, 6)
    ]
    shards = put(store, "shards", created="2026-11-20T00:00:00Z")
    put_run(store, "tiny-1", shards, sfts[0])
    put_run(store, "tiny-2", shards, sfts[3])
    point(store, "main", "tiny-1")

    head, *rows, _, more = said("ls")
    assert head.split() == ["stage", "fingerprint", "created", "run", "size", "names"]
    shown = [shards, *sfts[:1:-1], rl]
    assert [row.split()[:2] for row in rows] == [m.name.split("/") for m in shown]
    assert rows[0].endswith("main, tiny")
    assert rows[1].split()[2:] == ["2026-11-21T05:00:00Z", "tiny-1", "1.5", "kB"]
    assert rows[2].split()[-1] == "tiny"
    assert more == "2 older ones; --limit and --stage show more"

    assert [row.split()[1] for row in said("ls", "--stage", "sft", "--limit", "9")[1:]] == [
        m.name.split("/")[1] for m in sfts[::-1]
    ]
    tree = read("ls", "--limit", "9")
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


def test_what_is_wrong_with_an_artifact_is_in_its_row(
    store: Store, said: Callable[..., list[str]], read: Callable[..., Any]
):
    revoked, damaged, gone = put(store, "sft", 1), put(store, "sft", 2), put(store, "sft", 3)
    accepted = put(
        store,
        "rl",
        accepted={"from": "0" * 64, "earlier": [], "why": "renamed", "when": "w", "who": "a@b"}
        | {"proof": None},
    )
    revoke(store, revoked, why="test data", who="ann@desk", when="2026-11-21T07:00:00Z")
    store.put(f"sft/{damaged.fingerprint}/manifest.json", b"x")
    store.delete(f"sft/{gone.fingerprint}/manifest.json")

    rows = {row.split()[1]: row for row in said("ls", "--limit", "9")[1:]}
    assert rows.keys() == {m.name.split("/")[1] for m in (revoked, damaged, accepted)}
    assert rows[revoked.name.split("/")[1]].endswith("revoked: test data")
    assert rows[damaged.name.split("/")[1]].endswith("damaged")
    assert rows[accepted.name.split("/")[1]].endswith("accepted")
    problems = {item["fingerprint"]: item["problem"] for item in read("ls", "--stage", "sft")}
    assert problems[revoked.fingerprint] is None
    assert "is damaged" in problems[damaged.fingerprint]

    put_run(store, "tiny-1", gone, accepted)
    head, _, *rows = said("ls", "tiny")
    assert head.startswith("run tiny-1: finished, started ")
    assert [row.split()[:2] for row in rows] == [m.name.split("/") for m in (gone, accepted)]
    assert rows[0].endswith("gone")
    assert read("ls", "tiny")["artifacts"][0]["problem"] == "gone"


def test_entries_of_the_index_that_lead_nowhere_do_not_hide_artifacts(
    store: Store, said: Callable[..., list[str]]
):
    kept = put(store, "sft", created="2026-01-01T00:00:00Z")
    for number in range(8):
        store.put(f"index/sft/20300101t000000z-{number:064d}", b"")
    assert [row.split()[1] for row in said("ls")[1:2]] == [kept.name.split("/")[1]]


def test_a_run_is_listed_in_the_order_of_the_table(
    store: Store, said: Callable[..., list[str]], read: Callable[..., Any]
):
    made = [put(store, stage) for stage in ("rl", "shards", "sft")]
    put_run(store, "tiny-1", *made, status="failed")
    put_run(store, "tiny-2", name="other")
    assert [row.split()[0] for row in said("ls", "tiny-1")[2:]] == ["shards", "sft", "rl"]
    assert [row.split()[0] for row in said("ls", "tiny", "--stage", "sft")[2:]] == ["sft"]
    assert said("ls", "tiny-2")[1] == "no artifacts yet"
    assert read("ls", "tiny")["run"]["status"] == "failed"


def test_an_artifact_is_shown_with_its_files_inputs_and_logs(
    store: Store, said: Callable[..., list[str]], read: Callable[..., Any]
):
    mid = put(store, "midtrain")
    sft = put(store, "sft", inputs={"midtrain": mid}, files={"model/w": "x" * 1234, "a.json": "{}"})
    put_run(store, "tiny-1", mid, sft)
    point(store, "main", "tiny-1")
    text = "\n".join(said("ls", "sft@main"))
    assert text.startswith(f"{sft.name}: made 2026-11-21T06:00:00Z by run tiny-1\n")
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
    tree = read("ls", sft.name)
    assert tree["files"][1]["sha256"] == sft.files[1].sha256
    assert tree["inputs"]["midtrain"]["fingerprint"] == mid.fingerprint
    assert tree["url"] == f"{store.url}/sft/{sft.fingerprint}"


def test_an_ambiguous_prefix_lists_the_candidates(
    store: Store, fails: Callable[..., tuple[str, str]]
):
    one, other = two_alike("sft", run="tiny-7")
    put_artifact(store, one)
    put_artifact(store, other)
    error, hint = fails("ls", f"sft/{one.fingerprint[:4]}")
    assert "is ambiguous" in error
    assert f"{one.name} (2026-11-21T06:00:00Z, run tiny-7)" in hint
    assert other.name in hint


def test_what_others_wrote_cannot_move_the_cursor(
    store: Store, say: Say, capsys: pytest.CaptureFixture[str]
):
    evil = "tiny\x1b[2J\x07\u202e"
    one = put(store, "sft", 1, run=evil, files={"data": "1"}, metrics={evil: evil, "n": 1})
    two = put(store, "sft", 2, run=evil, files={"data": "2"}, metrics={evil: 2, "n": 2})
    put_run(store, "tiny-1", one, started=evil)
    put_run(store, "tiny-2", two, overrides=(evil,), started=evil)
    point(store, "main", "tiny-1")
    for words in (
        *("ls", "ls tiny", "ls sft@tiny", "tag", "tag main", "diff tiny-1 tiny-2"),
        f"diff {one.name} {two.name}",
    ):
        text = "\n".join(say(*words.split())[1])
        assert "tiny" in text
        assert "\x1b" not in text
        assert "\u202e" not in text
    point(store, "main", f"tiny-9{evil}")
    for words in ("ls main", f"tag best {one.name}"):
        assert main(words.split()) == 1
        assert "\x1b" not in capsys.readouterr().err


# tag.


def test_a_tag_is_set_moved_shown_and_removed(
    store: Store, said: Callable[..., list[str]], read: Callable[..., Any]
):
    old, new = put(store, "sft", 1), put(store, "sft", 2)
    put_run(store, "tiny-1", old)
    put_run(store, "tiny-2", new, status="running")

    assert said("tag") == ["no tags yet: nanochat tag main RUN"]
    assert said("tag", "main", "tiny-1") == ["main -> tiny-1 (finished, 1 of 14 stages)"]
    assert said("tag", "main", "tiny") == ["main: tiny-1 -> tiny-2 (running, 1 of 14 stages)"]
    assert said("tag", "main", "sft@tiny")[0].endswith("stages), as before")
    assert said("tag", "best", "main")[0].startswith("best -> tiny-2 ")
    assert said("tag", "best", old.name)[0].startswith("best: tiny-2 -> tiny-1 ")
    assert [line.split()[:3] for line in said("tag")[1:]] == [
        ["best", "tiny-1", "finished"],
        ["main", "tiny-2", "running"],
    ]
    assert said("tag", "best")[1:] == said("tag")[1:2]
    assert read("tag") == [
        {
            "tag": name,
            "run": run,
            "status": status,
            "stages": {"sft": made.fingerprint},
            "problem": None,
        }
        for name, run, status, made in (
            ("best", "tiny-1", "finished", old),
            ("main", "tiny-2", "running", new),
        )
    ]
    assert read("tag", "main", "tiny-1") == {"tag": "main", "run": "tiny-1", "before": "tiny-2"}
    assert said("tag", "--delete", "main") == ["main removed; it pointed at tiny-1"]
    assert read("tag", "best", "--delete") == {"tag": "best", "run": None, "before": "tiny-1"}
    assert said("tag", "--json") == ["[]"]


def test_a_tag_names_what_its_run_made(store: Store, said: Callable[..., list[str]]):
    old, new = put(store, "sft", 1), put(store, "sft", 2)
    put_run(store, "tiny-1", old)
    put_run(store, "tiny-2", new)
    said("tag", "main", "tiny-1")
    assert said("ls", "sft@main")[0].startswith(old.name)
    assert said("ls", "sft@tiny")[0].startswith(new.name)
    assert said("status", "main")[0] == "run tiny-1: finished"


def test_a_tag_that_would_hide_a_run_is_refused(
    store: Store, fails: Callable[..., tuple[str, str]]
):
    put_run(store, "mine-1", name="mine")
    for name, what in (("mine-1", "the id of a run"), ("mine", "the name of a run")):
        error, hint = fails("tag", name, "mine-1")
        assert error == f"{name} is {what}: a tag called so would hide it"
        assert hint == "choose another name, such as main"
    assert list(store.list("refs/")) == []


def test_damaged_and_idle_tags_are_listed_and_can_be_mended(
    store: Store, said: Callable[..., list[str]], fails: Callable[..., tuple[str, str]]
):
    put_run(store, "tiny-1")
    store.put("refs/broken.json", b"x")
    point(store, "idle", "tiny-0")
    point(store, "main", "tiny-1")
    broken, idle, main_tag = said("tag")[1:]
    assert "is damaged" in broken
    assert idle.split() == ["idle", "tiny-0", "its", "run", "has", "no", "record"]
    assert main_tag.split()[:3] == ["main", "tiny-1", "finished"]
    assert "damaged" in fails("ls", "broken")[0]
    assert "tiny-0, which has no record" in fails("ls", "idle")[0]
    assert fails("ls", "idle")[1] == "point it at another one: nanochat tag idle RUN"
    assert said("tag", "idle", "tiny-1")[0].startswith("idle: tiny-0 -> tiny-1")
    assert said("tag", "--delete", "broken") == ["broken removed; it was damaged"]
    assert find_tag(store, "broken") is None
    assert said("tag", "--delete", "idle")[0].startswith("idle removed")


# What these commands do without.


@pytest.mark.parametrize("words", ["ls", "ls tiny", "ls sft@tiny", "tag", "diff tiny tiny"])
def test_a_look_at_a_store_loads_nothing_heavy(words: str, store: Store):
    put_run(store, "tiny-1", put(store, "sft"))
    heavy = ("torch", "prefect", "boto3", "duckdb", "rich.progress", "pyarrow")
    script = (
        "import sys; from flows.cli import main; main(sys.argv[1:]);"
        f"sys.stderr.write(' '.join(m for m in {heavy!r} if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words.split()], capture_output=True, text=True, timeout=60
    )
    assert done.stdout
    assert done.stderr == ""
