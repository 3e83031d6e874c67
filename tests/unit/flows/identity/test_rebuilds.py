"""A forced rebuild starts from nothing, and resumes from its own state only."""

from pathlib import Path

import pytest

from flows.identity.rebuilds import NONE, open_work, rebuild_of
from nanochat_core.errors import StageError


def test_a_rebuild_keeps_its_own_state_and_removes_that_of_another(tmp_path: Path):
    work = tmp_path / "work"
    open_work(work, "first")
    (work / "checkpoint").touch()
    open_work(work, "first")
    assert (work / "checkpoint").exists()
    open_work(work, "second")
    assert not (work / "checkpoint").exists()
    assert rebuild_of(work) == "second"
    open_work(work, NONE)
    assert not work.exists()


def test_what_cannot_be_removed_is_not_taken_for_the_rebuilds_own(tmp_path: Path):
    disk, work = tmp_path / "disk", tmp_path / "work"
    (disk / "checkpoint").mkdir(parents=True)
    work.symlink_to(disk)  # nothing removes a directory through a link
    with pytest.raises(StageError, match=r"cannot be removed: .* link") as error:
        open_work(work, "second")
    assert str(work) in error.value.hint
    assert rebuild_of(work) == NONE
