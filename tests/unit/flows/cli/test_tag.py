"""`nanochat tag`: names that a user gives to runs."""

from flows.artifacts.runs import find_tag, point
from tests.support.flows.shelf import make_manifest, put_artifact, put_run


def put(store, seed):
    return put_artifact(store, make_manifest("sft", config={"seed": seed}))


def test_a_run_given_for_a_tag_is_named(store, terminal):
    put_run(store, "good-1", put(store, 0), name="good")
    for words in ("tag good", "tag --delete good", "tag goood"):
        terminal.refuses(words)


def test_a_tag_is_set_moved_shown_and_removed(store, terminal):
    old, new = put(store, 1), put(store, 2)
    put_run(store, "tiny-1", old)
    put_run(store, "tiny-2", new, status="running")
    for words in ("tag", "tag main tiny-1"):
        terminal.shows(words)
    for name in ("tiny", "sft@tiny"):  # tiny-2 has not finished
        terminal.shows(f"tag main {name}")
    for words in ("main tiny-2", "best main", f"best {old.name}", "", "best"):
        terminal.shows(f"tag {words}")
    assert terminal.read("tag") == [
        {"tag": "best", "run": "tiny-1", "status": "finished", "problem": None}
        | {"stages": {"sft": old.fingerprint}},
        {"tag": "main", "run": "tiny-2", "status": "running", "problem": None}
        | {"stages": {"sft": new.fingerprint}},
    ]
    moved = {"tag": "main", "run": "tiny-1", "before": "tiny-2"}
    assert terminal.read("tag", "main", "tiny-1") == moved
    terminal.shows("tag --delete main")
    removed = {"tag": "best", "run": None, "before": "tiny-1"}
    assert terminal.read("tag", "best", "--delete") == removed
    assert terminal.read("tag") == []


def test_a_tag_that_would_hide_a_run_is_refused(store, terminal):
    put_run(store, "mine-1", name="mine")
    for name in ("mine-1", "mine"):
        terminal.refuses(f"tag {name} mine-1")
    assert list(store.list("refs/")) == []


def test_damaged_and_idle_tags_are_listed_and_can_be_mended(store, terminal):
    put_run(store, "tiny-1")
    store.put("refs/broken.json", b"x")
    point(store, "idle", "tiny-0")
    point(store, "main", "tiny-1")
    terminal.shows("tag")
    terminal.refuses("ls broken")
    terminal.refuses("ls idle")
    terminal.shows("tag idle tiny-1")
    terminal.shows("tag --delete broken")
    assert find_tag(store, "broken") is None
    terminal.shows("tag --delete idle")
