"""Which run a name means, as docs/concepts/names.md has it."""

import dataclasses
from collections.abc import Sequence

import pytest

from flows.artifacts.names import open_artifact, open_newest_run, open_run
from flows.artifacts.runs import (
    Run,
    RunRecord,
    find_run,
    latest_runs,
    listed_runs,
    newest_runs,
    timestamp,
    write_run,
)
from flows.identity.manifest import Manifest
from flows.identity.ref import stamp
from infra.storage.base import Store
from nanochat_core.errors import NanochatError
from tests.support.flows.house import make_run
from tests.support.flows.shelf import make_manifest, put_artifact

# What happened, the run of sft@tiny, that of tiny, and that of `status tiny`.
CASES: dict[str, tuple[str, str, str, str]] = {
    "finished": ("start 1, sft 1, finish 1", "1", "1", "1"),
    "running": ("start 1, sft 1", "1", "1", "1"),
    "failed after sft": ("start 1, sft 1, fail 1", "1", "1", "1"),
    "a second runs": ("start 1, sft 1, finish 1, start 2, sft 2", "1", "1", "2"),
    "a second failed": ("start 1, sft 1, finish 1, start 2, sft 2, fail 2", "1", "1", "2"),
    "a second finished": ("start 1, sft 1, finish 1, start 2, sft 2, finish 2", "2", "2", "2"),
    "none finished": ("start 1, sft 1, fail 1, start 2, sft 2, fail 2", "2", "2", "2"),
    "none finished, the newest is not so far": ("start 1, sft 1, fail 1, start 2", "1", "2", "2"),
    "the newest made no sft": ("start 1, sft 1, finish 1, start 2, finish 2", "1", "2", "2"),
    "the older ends last": (
        "start 1, sft 1, start 2, sft 2, finish 2, finish 1",
        *("2", "2", "2"),
    ),
    "the newer is recorded first": (
        "start 2, sft 2, finish 2, start 1, sft 1, finish 1",
        *("2", "2", "2"),
    ),
    "a failed one is resumed": (
        "start 1, sft 1, fail 1, start 2, sft 2, fail 2, start 1, finish 1",
        *("1", "1", "2"),
    ),
    "a finished one runs again": ("start 1, sft 1, finish 1, start 1", "1", "1", "1"),
    "the newest is deleted": (
        "start 1, sft 1, finish 1, start 2, sft 2, finish 2, delete 2",
        *("1", "1", "1"),
    ),
    "the only finished one is deleted": (
        "start 1, sft 1, finish 1, start 2, sft 2, fail 2, delete 1",
        *("2", "2", "2"),
    ),
    "all are deleted": ("start 1, sft 1, finish 1, delete 1", "", "", ""),
    "one of a longer name": (
        "start 1, sft 1, finish 1, start tiny-d4, sft tiny-d4, finish tiny-d4",
        *("1", "1", "1"),
    ),
}


def make(number: str) -> Run:
    """The run with this number, which is its second, or of this name."""
    name = "tiny" if number.isdigit() else number
    started = timestamp(int(number) if number.isdigit() else 9)
    run = f"{name}-{stamp(started)}-{number[-1] * 4}"
    return dataclasses.replace(make_run(run), name=name, started=started)


def act(store: Store, events: Sequence[str]) -> None:
    """Do to the store what each event says."""
    records: dict[str, RunRecord] = {}
    for event in events:
        verb, number = event.split()
        if verb == "start":
            run = make(number)
            known = find_run(store, run.run)
            stages = known.stages if known else {}
            records[number] = RunRecord(store, dataclasses.replace(run, stages=stages))
            records[number].write()
        elif verb == "sft":
            records[number].add(put_artifact(store, make_sft(number)).ref)
        elif verb == "delete":
            store.delete(f"runs/{make(number).run}.json")
        else:
            records[number].end("finished" if verb == "finish" else "failed")


def make_sft(number: str) -> Manifest:
    """The artifact that the run with this number makes."""
    return make_manifest("sft", config={"run": number})


@pytest.mark.parametrize("case", CASES)
def test_a_name_means_the_run_that_the_table_says(store, case):
    events, artifact, run, newest = CASES[case]
    act(store, events.split(", "))
    for ask, expected in ((open_run, run), (open_newest_run, newest)):
        if expected:
            assert ask(store, "tiny").run == make(expected).run
        else:
            with pytest.raises(NanochatError, match="there is no run 'tiny'"):
                ask(store, "tiny")
    if artifact:
        assert open_artifact(store, "sft@tiny") == make_sft(artifact)
        assert open_artifact(store, "tiny") == make_sft(artifact)


def test_a_run_that_is_resumed_under_another_name_has_that_one(store):
    write_run(store, make("1"))
    write_run(store, dataclasses.replace(make("1"), name="mine"))
    assert open_run(store, "mine").run == make("1").run
    assert list(newest_runs(store, "tiny")) == []
    assert [run.name for run in latest_runs(store, 3, unread=[])] == ["mine"]


def test_a_run_without_a_name_is_found_by_its_id_alone(store):
    write_run(store, make("1"))
    (key,) = [entry.key for entry in store.list("names/")]
    store.delete(key)
    run = make("1").run
    assert open_run(store, run).run == run
    for name in ("other", "tiny"):
        with pytest.raises(NanochatError) as caught:
            open_run(store, name)
        assert "nanochat run tiny" in (caught.value.hint or "")


@pytest.mark.parametrize("key", ["names/tiny", "names/tiny/x", "names/tiny/1-", "names/a/1-b/c"])
def test_a_key_that_names_no_run_is_passed_over(store, key):
    write_run(store, make("1"))
    store.put(key if key.count("/") > 1 else f"{key}.json", b"")
    assert listed_runs(store) == [("tiny", make("1").run)]
    assert [run.run for run in newest_runs(store, "tiny")] == [make("1").run]
