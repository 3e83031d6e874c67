"""`ls`, `tag`, `compare` and `plan`: what a person sees of a store that has something in it."""

from typing import Any

import pytest

from flows.artifacts.runs import find_tag, point
from flows.stages import STAGES
from infra.storage.base import Store
from tests.support.flows.shelf import make_manifest, put_artifact, put_run
from tests.support.flows.terminal import Terminal


def put(store: Store, stage: str, seed: int = 0, **facts: Any):
    return put_artifact(store, make_manifest(stage, config={"seed": seed}, **facts))


# Mistakes.


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ("ls tnyi", "there is no run 'tnyi' in", "did you mean the profile 'tiny'?"),
        ("ls tiny", "tiny was never run in", "nanochat run tiny"),
        ("ls sft@tiny", "there is no sft@tiny in", "make one: nanochat run tiny"),
        ("ls sft/1a2b", "there is no artifact sft/1a2b in", "nanochat ls --stage sft"),
        ("ls sft/1a", "'1a' is not the beginning of a fingerprint", "4 digits or more"),
        ("ls sfx/1a2b", "there is no stage 'sfx'", "did you mean 'sft'?"),
        ("ls ..", "'..' cannot be the name of a run or a tag", "names in it are letters"),
        ("ls sft@../../x", "'../../x' cannot be the name of a run or a tag", "letters"),
        ("ls ../sft", "there is no stage '..'", "one of: shards"),
        ("ls --stage sfx", "there is no stage 'sfx'", "did you mean 'sft'?"),
        ("ls sft@tiny --stage sft", "--stage sft is given with the artifact", "leave it out"),
        ("tag main", "there is no tag main in", "make it: nanochat tag main RUN"),
        ("tag main tnyi", "there is no run 'tnyi' in", "did you mean the profile 'tiny'?"),
        ("tag main sft@tiny", "there is no sft@tiny in", "nanochat run tiny"),
        ("tag tiny d12", "tiny is a profile", "choose another name"),
        ("tag sft d12", "sft is a stage", "choose another name"),
        ("tag a/b tiny", "'a/b' cannot be the name", "short word"),
        ("tag -- -x tiny", "'-x' cannot be the name", "letters"),
        ("tag --delete", "--delete takes one tag", "nanochat tag --delete NAME"),
        ("tag --delete main tiny", "--delete takes one tag", "nanochat tag --delete NAME"),
        ("tag --delete main", "there is no tag main in", "make it"),
        ("tag --delete ../x", "'../x' cannot be the name", "letters"),
        ("compare tiny sft@tiny", "tiny is a run and sft@tiny is an artifact", "like sft@tiny"),
        ("compare sft/1a2b tiny", "tiny is a run and sft/1a2b is an artifact", "like sft@tiny"),
        ("compare sft@tiny sft@d12", "there is no sft@", "nanochat run"),
        ("compare tiny d12", "tiny was never run in", "nanochat run tiny"),
        ("plan tiny sfx", "there is no stage 'sfx'", "did you mean 'sft'?"),
        ("plan toknizer", "there is no profile 'toknizer'", "did you mean the stage 'tokenizer'?"),
        ("chat pretran", "there is no profile, run or model 'pretran'", "the stage 'pretrain'?"),
        ("tag sft", "'sft' is a stage, not a tag", "for the artifact of a run: sft@tiny"),
        ("plan sft tiny", "'sft' is a stage, not a profile", "the profile comes first: tiny sft"),
        ("plan tiny d12", "'d12' is a profile, not a stage", "one of: shards"),
        ("plan tiny sft@tiny", "'sft@tiny' is an artifact, not a stage", "its stage is sft"),
        ("plan tiny tny", "there is no stage 'tny'", "did you mean the profile 'tiny'?"),
        ("plan tiny xyz", "there is no stage 'xyz'", "one of: shards"),
        ("stage rl tiny", "'rl' is a stage, not a profile", "the profile comes first: tiny rl"),
        ("plan tiny seed=7", "'seed=7' is a setting, not a stage", "--set seed=7"),
        ("plan seed=7", "'seed=7' is a setting, not a profile", "--set seed=7"),
        ("sweep sft --vary seed=1,2", "'sft' is a stage, not a profile", "tiny sft"),
        ("config sft", "'sft' is a stage, not a profile", "tiny sft"),
        (
            "ls tiny@sft",
            "'tiny@sft' does not name an artifact: the stage",
            "did you mean 'sft@tiny'?",
        ),
        (
            "fetch demo@rl",
            "'demo@rl' does not name an artifact: the stage",
            "did you mean 'rl@demo'?",
        ),
        ("chat sft", "'sft' is a stage, not a model", "for the artifact of a run: sft@tiny"),
        ("status sft -f", "'sft' is a stage, not a run", "for the artifact of a run: sft@tiny"),
        ("status rl", "'rl' is a stage, not a run", "for the artifact of a run: rl@tiny"),
        ("compare tiny seed=7", "tiny was never run in", "nanochat run tiny"),
        ("evals tiny --json", "--json is of the list of schedules", "leave MODEL out"),
        ("up --register --port 4300", "--register starts no server", "give --pool alone"),
        ("fetch sft@tiny model --as hf", "--as hf is of a whole model", "leave model or --as out"),
        ("fetch sft@tiny --dtype fp32", "--dtype is given without --as hf", "as they are"),
    ],
)
def test_a_mistake_is_answered_in_two_lines(words: str, error: str, hint: str, terminal: Terminal):
    found = terminal.fails(*words.split())
    assert found[0].startswith(error)
    assert hint in found[1]


@pytest.mark.parametrize("words", ["plan", "run", "run --submit", "sweep", "miniseries"])
def test_a_run_given_for_a_profile_is_answered_with_its_profile_and_settings(
    words: str, store: Store, terminal: Terminal
):
    sft = put(store, "sft")
    put_run(store, "tiny2-1", sft, name="tiny2", depth=2, overrides=("seed=7",))
    point(store, "best", "tiny2-1")
    rest = ["--vary", "seed=1,2"] if words == "sweep" else []
    rest += ["--depths", "1,2"] if words == "miniseries" else []
    recipe = "give its profile and settings: tiny --depth 2 --set seed=7 --name tiny2"
    for word, kind in (("tiny2", "a run"), ("best", "a tag"), ("sft@best", "an artifact")):
        assert terminal.fails(*words.split(), word, *rest) == (
            f"'{word}' is {kind}, not a profile",
            recipe,
        )
    assert terminal.fails(*words.split(), "tinyy", *rest)[1] == "did you mean 'tiny'?"
    assert terminal.fails(*words.split(), "bests", *rest)[1] == "did you mean the run 'best'?"


@pytest.mark.parametrize("words", ["ls", "tag", "ls tiny", "compare sft@a sft@b", "tag main tiny"])
def test_a_store_that_is_not_there_is_an_error_and_not_an_empty_one(words: str, terminal: Terminal):
    assert (
        "cannot be reached"
        in terminal.fails(*words.split(), "--store", "file:///not/mounted/store")[0]
    )


def test_a_damaged_record_is_named(store: Store, terminal: Terminal):
    put_run(store, "tiny-1")
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
        ("compare tiny-1 d12-1", "runs/tiny-1.json"),
        (f"compare sft@d12 {sft.name}", "manifest.json"),
    ):
        error, hint = terminal.fails(*words.split())
        assert f"{store.url}/" in error
        assert key in error
        assert hint


# tag.


def test_a_run_given_for_a_tag_is_named(store: Store, terminal: Terminal):
    put_run(store, "good-1", put(store, "sft"), name="good")
    for words in (["tag", "good"], ["tag", "--delete", "good"]):
        error, hint = terminal.fails(*words)
        assert (error, hint) == (
            "'good' is a run, not a tag",
            "give it a tag: nanochat tag NAME good",
        )
    assert terminal.fails("tag", "goood")[1] == "did you mean the run 'good'?"


def test_a_tag_is_set_moved_shown_and_removed(store: Store, terminal: Terminal):
    old, new = put(store, "sft", 1), put(store, "sft", 2)
    put_run(store, "tiny-1", old)
    put_run(store, "tiny-2", new, status="running")

    found = f"1 of {len(STAGES)} stages"
    assert terminal.said("tag") == ["no tags yet: nanochat tag main RUN"]
    assert terminal.said("tag", "main", "tiny-1") == [f"main -> tiny-1 (finished, {found})"]
    for name in ("tiny", "sft@tiny"):  # tiny-2 has not finished
        assert terminal.said("tag", "main", name)[0].endswith("stages), as before")
    assert terminal.said("tag", "main", "tiny-2") == [f"main: tiny-1 -> tiny-2 (running, {found})"]
    assert terminal.said("tag", "best", "main")[0].startswith("best -> tiny-2 ")
    assert terminal.said("tag", "best", old.name)[0].startswith("best: tiny-2 -> tiny-1 ")
    assert [line.split()[:3] for line in terminal.said("tag")[1:]] == [
        ["best", "tiny-1", "finished"],
        ["main", "tiny-2", "running"],
    ]
    assert terminal.said("tag", "best")[1:] == terminal.said("tag")[1:2]
    assert terminal.read("tag") == [
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
    assert terminal.read("tag", "main", "tiny-1") == {
        "tag": "main",
        "run": "tiny-1",
        "before": "tiny-2",
    }
    assert terminal.said("tag", "--delete", "main") == ["main removed; it pointed at tiny-1"]
    assert terminal.read("tag", "best", "--delete") == {
        "tag": "best",
        "run": None,
        "before": "tiny-1",
    }
    assert terminal.said("tag", "--json") == ["[]"]


def test_a_tag_that_would_hide_a_run_is_refused(store: Store, terminal: Terminal):
    put_run(store, "mine-1", name="mine")
    for name in ("mine-1", "mine"):
        error, hint = terminal.fails("tag", name, "mine-1")
        assert error == f"{name} is a run: a tag called so would hide it"
        assert hint == "choose another name, such as main"
    assert list(store.list("refs/")) == []


def test_damaged_and_idle_tags_are_listed_and_can_be_mended(store: Store, terminal: Terminal):
    put_run(store, "tiny-1")
    store.put("refs/broken.json", b"x")
    point(store, "idle", "tiny-0")
    point(store, "main", "tiny-1")
    broken, idle, main_tag = terminal.said("tag")[1:]
    assert "is damaged" in broken
    assert idle.split() == ["idle", "tiny-0", "its", "run", "has", "no", "record"]
    assert main_tag.split()[:3] == ["main", "tiny-1", "finished"]
    assert "damaged" in terminal.fails("ls", "broken")[0]
    assert "tiny-0, which has no record" in terminal.fails("ls", "idle")[0]
    assert terminal.fails("ls", "idle")[1] == "point it at another one: nanochat tag idle RUN"
    assert terminal.said("tag", "idle", "tiny-1")[0].startswith("idle: tiny-0 -> tiny-1")
    assert terminal.said("tag", "--delete", "broken") == ["broken removed; it was damaged"]
    assert find_tag(store, "broken") is None
    assert terminal.said("tag", "--delete", "idle")[0].startswith("idle removed")


# What these commands do without.
