"""Runs are remembered, names find them, and tags point at one."""

import threading
import time
from pathlib import Path

import pytest

from flows.artifacts.runs import (
    TAG_FORMAT,
    check_name,
    find_tag,
    known_names,
    latest_runs,
    new_run_id,
    newest_runs,
    point,
    remove_tag,
    runs_called,
    tag_names,
    timestamp,
)
from flows.identity.records import encode_record
from infra.storage.base import VersionedObject
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, ConfigError
from tests.support.flows.shelf import Counting, put_run


def run_id(name: str, second: int) -> str:
    """As a real run has one, so long after the epoch."""
    return f"{name}-{timestamp(second).lower().replace('-', '').replace(':', '')}-0a1b"


# Runs.


def test_the_longest_name_can_be_written(store):
    name = check_name("x" * 161)
    run = new_run_id(name, timestamp(0))
    put_run(store, run, name=name)
    assert [found.run for found in runs_called(store, name)] == [run]


def test_ids_of_runs_sort_by_time_and_never_collide():
    first, second = (new_run_id("tiny", timestamp(seconds)) for seconds in (0, 1))
    assert first.startswith("tiny-19700101t000000z-")
    assert first < second
    assert new_run_id("tiny", timestamp(0)) != new_run_id("tiny", timestamp(0))


def test_a_run_whose_id_was_chosen_is_found_by_its_name(store):
    """Such as the number of a Slurm job, which does not begin with the name of the run."""
    put_run(store, "slurm-17", name="d12")
    put_run(store, "slurm-18", name="d13")
    store.put("runs/slurm-18.json", b"damaged")
    assert [run.run for run in newest_runs(store, "d12")] == ["slurm-17"]
    assert list(newest_runs(store, "tiny")) == []


def test_a_run_whose_id_was_chosen_is_newest_only_until_another_starts(store):
    put_run(store, "tiny-again", started=timestamp(time.time()))
    later = new_run_id("tiny", timestamp(time.time() + 60))
    put_run(store, later)
    put_run(store, run_id("tiny", 1))
    found = [run.run for run in newest_runs(store, "tiny")]
    assert found == [later, "tiny-again", run_id("tiny", 1)]


def test_of_many_runs_only_those_asked_for_are_read(tmp_path):
    store = Counting(tmp_path / "store")
    for number in range(40):
        put_run(store, run_id("tiny", number))
        put_run(store, run_id("tiny-wide", number), name="tiny-wide")
        put_run(store, run_id("d12", number), name="d12")

    assert next(newest_runs(store, "tiny")).run == run_id("tiny", 39)
    assert store.gets == [f"runs/{run_id('tiny', 39)}.json"]
    assert store.lists == ["names/tiny/"]
    store.gets.clear()
    found = [run.run for run in newest_runs(store, "tiny")]
    assert found == [run_id("tiny", number) for number in reversed(range(40))]
    assert len(store.gets) == 40


def test_many_runs_are_read_at_the_same_time(tmp_path):
    """A mistyped stage of a name is looked for in all of them, each a request to the store."""

    class Meeting(LocalStore):
        def get_stored(self, key: str) -> VersionedObject:
            if key.startswith("runs/") and key != f"runs/{newest}.json":
                barrier.wait(10)
            return super().get_stored(key)

    barrier, newest = threading.Barrier(8), run_id("tiny", 8)
    store = Meeting(tmp_path / "store")
    for number in range(9):
        put_run(store, run_id("tiny", number))
    assert len(list(newest_runs(store, "tiny"))) == 9
    newest = ""  # the latest runs are all wanted, so none is read alone
    assert len(latest_runs(store, 8, unread=[])) == 8


def test_the_latest_runs_are_those_that_started_last_whatever_their_name(tmp_path):
    store = Counting(tmp_path / "store")
    for number, name in enumerate(("tiny", "d12", "a", "z", "d12", "tiny")):
        put_run(store, run_id(name, number), name=name)
    put_run(store, run_id("b", 9), name="b")
    store.put(f"runs/{run_id('b', 9)}.json", b"damaged")
    store.gets.clear()
    names = [run.name for run in latest_runs(store, 4, unread=[])]
    assert names == ["tiny", "d12", "z"]
    assert len([key for key in store.gets if "/b-" not in key]) == 3


def test_a_damaged_record_does_not_hide_a_newer_run(store):
    for number in (1, 2, 3, 4):
        put_run(store, run_id("tiny", number))
    store.put(f"runs/{run_id('tiny', 1)}.json", b"damaged")
    found = newest_runs(store, "tiny")
    assert [next(found).run for _ in range(3)] == [run_id("tiny", n) for n in (4, 3, 2)]
    with pytest.raises(ArtifactError, match="damaged"):
        next(found)


# What a name stands for.


def test_a_name_is_a_tag_then_an_id_then_what_runs_are_called(store):
    tiny = [run_id("tiny", number) for number in range(3)]
    for number in (1, 2):
        put_run(store, tiny[number])
    put_run(store, "main", name="other")

    def called(name: str) -> list[str]:
        return [run.run for run in runs_called(store, name)]

    assert called("tiny") == [tiny[2], tiny[1]]
    assert called(tiny[1]) == [tiny[1]]
    assert called("main") == ["main"]
    assert called("tin") == []
    point(store, "main", tiny[1])
    assert called("main") == [tiny[1]]


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "/etc/passwd", "a/b", "a//b", "a/../b", "-x", "a b", "a\nb"),
        *("a\0b", "x" * 300, "x" * 162, "caf\u00e9", "a@b", "a\\b", "%2e%2e", "~", "a\x1b[1m"),
    ],
)
@pytest.mark.parametrize(
    "ask",
    [
        check_name,
        lambda name: list(runs_called(LocalStore(Path("/nowhere/store")), name)),
        lambda name: point(LocalStore(Path("/nowhere/store")), name, "tiny-1-a"),
        lambda name: remove_tag(LocalStore(Path("/nowhere/store")), name),
    ],
    ids=["check", "find", "point", "remove"],
)
def test_what_cannot_be_a_name_is_refused_before_the_store_is_asked(name, ask):
    with pytest.raises(ConfigError, match="cannot be the name of a run or a tag") as caught:
        ask(name)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 120
    assert caught.value.hint


def test_known_names_are_those_of_runs_and_tags(store):
    assert known_names(store) == []
    put_run(store, run_id("tiny", 1))
    put_run(store, run_id("d12-wide", 2), name="d12-wide")
    put_run(store, "by-hand", name="other")
    point(store, "main", run_id("tiny", 1))
    assert known_names(store) == ["d12-wide", "main", "other", "tiny"]


# Tags.


def test_a_tag_says_what_it_pointed_at_before(store):
    assert find_tag(store, "main") is None
    assert point(store, "main", "tiny-1-a") is None
    assert point(store, "main", "tiny-2-a") == "tiny-1-a"
    assert point(store, "main", "tiny-2-a") == "tiny-2-a"
    assert find_tag(store, "main") == "tiny-2-a"
    assert tag_names(store) == ["main"]
    remove_tag(store, "main")
    assert find_tag(store, "main") is None
    remove_tag(store, "main")


def test_a_damaged_tag_can_be_set_again(store):
    put_run(store, "tiny-1-a")
    store.put("refs/main.json", b"{")
    with pytest.raises(ArtifactError, match=r"refs/main\.json"):
        list(runs_called(store, "main"))
    assert point(store, "main", "tiny-1-a") is None
    assert find_tag(store, "main") == "tiny-1-a"


def test_a_tag_whose_run_is_gone_is_an_error_and_no_other_run(store):
    put_run(store, "main-2-a", name="main")
    point(store, "main", "tiny-1-a")
    with pytest.raises(ArtifactError, match="points at run tiny-1-a, which has no record"):
        list(runs_called(store, "main"))


def test_a_tag_cannot_lead_out_of_the_runs(store):
    store.put(
        "refs/main.json", encode_record({"tag": "main", "run": "../../secret"}, format=TAG_FORMAT)
    )
    with pytest.raises(ArtifactError, match="is not a tag: run is"):
        list(runs_called(store, "main"))
