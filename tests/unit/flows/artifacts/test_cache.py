"""Fetched artifacts: whole at each use, and mended, file by file, where they are not."""

import os
from pathlib import Path

import pytest

from flows.artifacts.cache import Cache, fetch
from nanochat_core.errors import ArtifactError
from tests.support.flows.rows import GIGABYTE, publish_rows
from tests.support.flows.stores import DyingStore
from tests.unit.flows.artifacts.conftest import DAMAGE
from tests.unit.flows.artifacts.test_cache_room import names


def test_a_whole_copy_needs_no_store(store, cache, manifest):
    directory = fetch(store, manifest, cache)
    assert len(store.fetched) == 4
    for file in manifest.files:
        store.delete(file.key)
    assert fetch(store, manifest, cache) == directory
    assert len(store.fetched) == 4


@pytest.mark.parametrize("kind", [*DAMAGE, "gone", "a directory"])
@pytest.mark.parametrize("name", ["files/train.rows", "logs/events.jsonl", "manifest.json"])
def test_what_is_damaged_in_a_copy_is_fetched_again_and_nothing_else(
    store, cache, manifest, kind, name
):
    directory = fetch(store, manifest, cache)
    whole = (directory / name).read_bytes()
    (directory / name).unlink()
    if kind == "a directory":
        (directory / name).mkdir()
    elif kind in DAMAGE:
        (directory / name).write_bytes(DAMAGE[kind](whole))
    store.fetched.clear()
    assert fetch(store, manifest, cache) == directory
    assert (directory / name).read_bytes() == whole
    files = {"files/train.rows": manifest.files[2], "logs/events.jsonl": manifest.logs[0]}
    assert store.fetched == ([files[name].key] if name in files else [])
    assert names(directory.parent) == [directory.name]


@pytest.mark.parametrize("intruder", ["files/extra", "files/sub/extra", "logs/link", "files/dir"])
def test_what_is_too_much_in_a_copy_is_removed(store, cache, tmp_path, manifest, intruder):
    directory = fetch(store, manifest, cache)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    if intruder == "logs/link":
        (directory / intruder).symlink_to("/etc/passwd")
    elif intruder == "files/dir":
        (directory / intruder).symlink_to(tmp_path / "elsewhere")
    else:
        (directory / intruder).write_text("")
    fetch(store, manifest, cache)
    assert not os.path.lexists(directory / intruder)
    assert names(tmp_path / "elsewhere") == ["mine"]


@pytest.mark.parametrize("link", ["", "files", "logs"])
def test_a_link_in_a_copy_is_replaced_and_where_it_leads_nothing_is_removed(
    store, cache, tmp_path, manifest, link
):
    directory = fetch(store, manifest, cache)
    (directory / link).rename(tmp_path / "elsewhere")
    for name in ("mine", "files/mine", "logs/mine"):
        (tmp_path / "elsewhere" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "elsewhere" / name).write_text("mine")
    (directory / link).symlink_to(tmp_path / "elsewhere")
    before = names(tmp_path / "elsewhere")
    fetch(store, manifest, cache)
    assert names(tmp_path / "elsewhere") == before
    assert (tmp_path / "elsewhere" / "files" / "mine").exists()
    assert not any(path.is_symlink() for path in (directory, *directory.rglob("*")))


def test_a_cache_that_cannot_be_written_says_so(store, manifest):
    with (
        Cache(Path("/proc/nowhere"), GIGABYTE) as cache,
        pytest.raises(ArtifactError, match="cannot be written") as caught,
    ):
        fetch(store, manifest, cache)
    assert "NANOCHAT_HOME" in (caught.value.hint or "")


def test_an_interrupted_fetch_is_resumed(store, cache, tmp_path, monkeypatch):
    manifest = publish_rows(store, tmp_path).manifest
    monkeypatch.setattr("flows.artifacts.transfer.THREADS", 1)
    dying = DyingStore(tmp_path / "store")
    with pytest.raises(KeyboardInterrupt):
        fetch(dying, manifest, cache)
    (entry,) = (cache.directory / "rows").glob(".*.new")
    (entry / "whole" / "files" / "left").write_text("of another attempt")
    assert not list((cache.directory / "rows").glob("*/manifest.json"))
    directory = fetch(store, manifest, cache)
    assert len(dying.fetched) == 1
    assert sorted([*dying.fetched, *store.fetched]) == sorted(
        file.key for file in (*manifest.files, *manifest.logs)
    )
    assert names(directory / "files") == ["rows.json", "sub", "train.rows"]
