"""One process builds a fingerprint; the others wait, know for whom, and go on when it ends."""

import os
import shutil
from pathlib import Path

import pytest

from flows.identity.ref import ArtifactRef
from flows.leases import file_lock
from flows.leases.file_lock import (
    Owner,
    find_owner,
    hold,
    home_id,
    lock_path,
    try_hold,
    work_directory,
)
from nanochat_core.errors import StageError


def nobody_expected(owner: Owner | None) -> None:
    raise AssertionError(f"waited for {owner}")


def test_the_lock_and_the_work_of_a_fingerprint_lie_side_by_side(tmp_path: Path):
    assert (
        lock_path(tmp_path, ArtifactRef("sft", "ab" * 32)) == tmp_path / "sft" / "abababababab.lock"
    )
    assert (
        work_directory(tmp_path, ArtifactRef("sft", "ab" * 32)) == tmp_path / "sft" / "abababababab"
    )


def test_a_free_lock_is_taken_at_once_and_given_back(tmp_path: Path):
    path = tmp_path / "sft" / "x.lock"
    for _ in range(2):
        with hold(path, nobody_expected):
            owner = find_owner(path)
            assert owner is not None
            assert owner.pid == os.getpid()
        assert find_owner(path) is None


def test_a_lock_that_was_never_taken_is_free(tmp_path: Path):
    assert find_owner(tmp_path / "none" / "x.lock") is None


def test_an_error_inside_gives_the_lock_back(tmp_path: Path):
    with pytest.raises(ValueError, match="inside"), hold(tmp_path / "x.lock", nobody_expected):
        raise ValueError("inside")
    assert find_owner(tmp_path / "x.lock") is None


def test_another_fingerprint_is_not_waited_for(tmp_path: Path):
    with hold(tmp_path / "a.lock", nobody_expected), hold(tmp_path / "b.lock", nobody_expected):
        pass


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StageError, match="cannot be written: ") as caught,
        hold(tmp_path / "file" / "x.lock", nobody_expected),
    ):
        pass
    assert "NANOCHAT_HOME" in (caught.value.hint or "")


def test_a_lock_is_held_only_if_it_is_free(tmp_path: Path):
    path = tmp_path / "sft" / "x.lock"
    with try_hold(path) as first, try_hold(path) as second:
        assert (first, second) == (True, False)
        owner = find_owner(path)
        assert owner is not None
        assert owner.pid == os.getpid()
    assert find_owner(path) is None
    with try_hold(path) as again:
        assert again


def test_a_copied_home_is_another_one_because_its_locks_are(tmp_path: Path):
    made = home_id(tmp_path / "home")
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    assert home_id(tmp_path / "copy") != made == home_id(tmp_path / "home")


def test_a_home_seen_from_another_kernel_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = home_id(tmp_path)
    monkeypatch.setattr(file_lock, "boot_id", lambda: "another")
    assert home_id(tmp_path) != made
