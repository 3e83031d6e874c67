"""Runs are remembered, and sft@tiny finds what the latest run called tiny made."""

import dataclasses
from pathlib import Path

import pytest

from flows.artifacts import publish
from flows.fingerprint import Identity, fingerprint_of
from flows.manifest import Manifest, Provenance
from flows.runs import (
    Run,
    find_run,
    new_run_id,
    newest_runs,
    point,
    resolve,
    timestamp,
    write_run,
)
from infra.storage.local import LocalStore
from nanochat_core.errors import ArtifactError, StoreError

RUN = Run(
    run="tiny-20260101t000000z-0000",
    name="tiny",
    profile="tiny",
    depth=None,
    overrides=("sft.num_epochs=2",),
    status="finished",
    started="2026-01-01T00:00:00Z",
    ended=None,
    stages={},
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def publish_sft(store: LocalStore, tmp_path: Path, content: str) -> Manifest:
    output = tmp_path / content
    output.mkdir()
    (output / "model").write_text(content)
    preimage = {"stage": "sft", "format": 1, "config": {"c": content}, "inputs": {}, "code": {}}
    return publish(
        store,
        Identity(stage="sft", fingerprint=fingerprint_of(preimage), preimage=dict(preimage)),
        output,
        logs=[],
        inputs={},
        provenance=Provenance(
            run="r",
            owner="o",
            epoch=1,
            created="2026-01-01T00:00:00Z",
            git_commit=None,
            metrics={},
            segments=(),
        ),
        fence=lambda: None,
    ).manifest


def record(store: LocalStore, run: str, *, name: str = "tiny", sft: Manifest | None = None) -> None:
    stages = {"sft": sft.fingerprint} if sft else {}
    write_run(store, dataclasses.replace(RUN, run=run, name=name, stages=stages))


def test_a_run_is_remembered_as_it_was_written(store: LocalStore):
    write_run(store, RUN)
    write_run(store, dataclasses.replace(RUN, status="failed"))
    assert find_run(store, RUN.run) == dataclasses.replace(RUN, status="failed")
    assert find_run(store, "tiny-20260101t000000z-0001") is None


def test_ids_of_runs_sort_by_time_and_never_collide():
    first, second = (new_run_id("tiny", timestamp(seconds)) for seconds in (0, 1))
    assert first.startswith("tiny-19700101t000000z-")
    assert first < second
    assert new_run_id("tiny", timestamp(0)) != new_run_id("tiny", timestamp(0))


def test_runs_of_a_name_come_newest_first_and_without_those_of_longer_names(store: LocalStore):
    for run, name in (
        ("tiny-1-a", "tiny"),
        ("tiny-3-a", "tiny"),
        ("tiny-2-a", "tiny"),
        ("tiny-2-9-a", "tiny-2"),
    ):
        record(store, run, name=name)
    assert [run.run for run in newest_runs(store, "tiny")] == ["tiny-3-a", "tiny-2-a", "tiny-1-a"]


def test_a_name_finds_the_latest_run_that_made_the_stage(store: LocalStore, tmp_path: Path):
    old, new = publish_sft(store, tmp_path, "old"), publish_sft(store, tmp_path, "new")
    record(store, "tiny-1-a", sft=old)
    assert resolve(store, "sft@tiny") == old
    record(store, "tiny-2-a", sft=new)
    assert resolve(store, "sft@tiny") == new
    record(store, "tiny-3-a")  # failed before sft
    assert resolve(store, "sft@tiny") == new
    assert resolve(store, "sft@tiny-1-a") == old


def test_a_ref_comes_before_a_runs_name(store: LocalStore, tmp_path: Path):
    old, new = publish_sft(store, tmp_path, "old"), publish_sft(store, tmp_path, "new")
    record(store, "tiny-1-a", sft=old)
    record(store, "tiny-2-a", sft=new)
    point(store, "main", "tiny-1-a")
    assert resolve(store, "sft@main") == old
    point(store, "main", "tiny-2-a")
    assert resolve(store, "sft@main") == new


def test_a_name_nobody_has_lists_those_there_are(store: LocalStore):
    with pytest.raises(ArtifactError, match="there is no sft@tiny") as caught:
        resolve(store, "sft@tiny")
    assert caught.value.hint == "make one: nanochat run tiny"
    record(store, "d12-2026-a", name="d12")
    with pytest.raises(ArtifactError) as caught:
        resolve(store, "sft@tiny")
    assert caught.value.hint == "runs there: d12"


@pytest.mark.parametrize("reference", ["sft", "", "sft@", "@tiny", "sft@../x", "sft@a b"])
def test_what_is_no_name_is_refused(store: LocalStore, reference: str):
    with pytest.raises((ArtifactError, StoreError)):
        resolve(store, reference)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format": 2}', b'{"format": 1, "run": "x"}'])
def test_a_damaged_record_is_an_error(store: LocalStore, data: bytes):
    store.put("runs/tiny-1-a.json", data)
    with pytest.raises(ArtifactError, match=r"runs/tiny-1-a\.json"):
        find_run(store, "tiny-1-a")
