"""A person's own copy: what they have is kept, what is there is not fetched again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.artifacts.download import choose_files, copy_files
from flows.identity.manifest import Manifest
from infra.storage.base import OnBytes, ignore_bytes
from nanochat_core.errors import ArtifactError, ConfigError
from tests.support.flows.rows import publish_files
from tests.support.flows.stores import CountingStore, DyingStore

FILES = {"config.json": b"{}", "tokenizer/a.json": b"[1]", "tokenizer/b/c.bin": b"123456"}


@pytest.fixture
def manifest(store: CountingStore, tmp_path: Path) -> Manifest:
    return publish_files(store, "sft", FILES, tmp_path)


def copy(
    store: CountingStore, manifest: Manifest, target: Path, path: str | None = None
) -> list[str]:
    """Copy the files at `path` and return those that were fetched."""
    fetched = copy_files(store, manifest, choose_files(manifest, path), target)
    return [file.path for file in fetched]


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (None, list(FILES)),
        ("config.json", ["config.json"]),
        ("tokenizer", ["tokenizer/a.json", "tokenizer/b/c.bin"]),
        ("./tokenizer/b/", ["tokenizer/b/c.bin"]),
    ],
)
def test_a_file_or_a_folder_is_chosen_by_its_path(manifest, path, names):
    assert [file.path for file in choose_files(manifest, path)] == names


@pytest.mark.parametrize("path", ["config", "token", "a.json", "../config.json", "tokenizer/x"])
def test_for_a_path_that_is_not_there_it_says_what_is(manifest, path):
    with pytest.raises(ArtifactError, match=f"there is no '{path}' in sft/") as caught:
        choose_files(manifest, path)
    assert caught.value.hint == "in it: config.json, tokenizer/"


def test_a_new_directory_appears_with_all_files(store, manifest, tmp_path):
    target = tmp_path / "new" / "mine"
    assert copy(store, manifest, target) == list(FILES)
    assert contents(target) == FILES
    assert [path.name for path in target.parent.iterdir()] == ["mine"]
    assert os.access(target / "config.json", os.W_OK)
    (target / "config.json").write_text("mine")  # no part of the store
    assert store.get(manifest.files[0].key) == b"{}"


def test_only_what_was_chosen_is_fetched_and_the_rest_can_follow(store, manifest, tmp_path):
    target = tmp_path / "mine"
    copy(store, manifest, target, "tokenizer")
    assert len(store.fetched) == 2
    assert set(contents(target)) == {"tokenizer/a.json", "tokenizer/b/c.bin"}
    assert copy(store, manifest, target) == ["config.json"]
    assert len(store.fetched) == 3
    assert contents(target) == FILES


def test_a_complete_copy_is_read_and_nothing_is_written_or_fetched(store, manifest, tmp_path):
    target = tmp_path / "mine"
    copy(store, manifest, target)
    (target / "notes").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in [target, *target.rglob("*")]}
    store.fetched.clear()
    assert copy(store, manifest, target) == []
    assert store.fetched == []
    assert {path: path.stat().st_mtime_ns for path in [target, *target.rglob("*")]} == before


def test_a_file_that_differs_is_never_overwritten(store, manifest, tmp_path):
    target = tmp_path / "mine"
    target.mkdir()
    (target / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"mine/config\.json exists already and differs from sft"):
        copy(store, manifest, target)
    assert contents(target) == {"config.json": b"mine"}
    assert store.fetched == []
    copy(store, manifest, target, "tokenizer")
    assert contents(target) == {**FILES, "config.json": b"mine"}


def test_what_is_no_directory_is_never_written_into(store, manifest, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    for name in ("file", "broken"):
        with pytest.raises(ConfigError, match=f"{name} exists already"):
            copy(store, manifest, tmp_path / name)
    elsewhere, target = tmp_path / "elsewhere", tmp_path / "mine"
    elsewhere.mkdir()
    target.mkdir()
    (target / "tokenizer").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is not a directory of its own"):
        copy(store, manifest, target)
    (target / "tokenizer").unlink()
    (target / "tokenizer").write_text("mine")
    with pytest.raises(ConfigError, match="is not a directory of its own"):
        copy(store, manifest, target)
    assert list(elsewhere.iterdir()) == []
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_to_a_directory_is_followed_as_the_person_meant(store, manifest, tmp_path):
    (tmp_path / "large-disk").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "large-disk")
    copy(store, manifest, tmp_path / "mine")
    assert contents(tmp_path / "large-disk") == FILES


@pytest.fixture
def interrupted(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A directory that was to be filled when the person pressed Ctrl-C after the first file."""
    monkeypatch.setattr("flows.artifacts.transfer.THREADS", 1)
    with pytest.raises(KeyboardInterrupt):
        copy(DyingStore(tmp_path / "store"), manifest, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    return tmp_path / "mine"


def test_an_interrupted_copy_is_resumed(store, manifest, interrupted):
    copied = copy(store, manifest, interrupted)
    assert len(store.fetched) == len(copied) == 2
    assert contents(interrupted) == FILES
    assert not interrupted.with_name(".mine.new").exists()


def test_what_an_interrupted_copy_of_another_artifact_left_is_not_mixed_in(
    store, tmp_path, interrupted
):
    other = publish_files(store, "rl", {"other.json": b"{}"}, tmp_path)
    copy(store, other, interrupted)
    assert contents(interrupted) == {"other.json": b"{}"}


def test_two_copies_to_one_place_do_not_disturb_each_other(store, manifest, tmp_path):
    class Second(CountingStore):
        """While the first copy runs, another is started."""

        def fetch(
            self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes
        ) -> None:
            with pytest.raises(ConfigError, match="another process is fetching into"):
                copy(store, manifest, tmp_path / "mine")
            super().fetch(key, path, size=size, on_bytes=on_bytes)

    copy(Second(tmp_path / "store"), manifest, tmp_path / "mine")
    assert contents(tmp_path / "mine") == FILES
    assert store.fetched == []
