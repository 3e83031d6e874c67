"""One process builds a fingerprint; the others wait, and go on when it ends."""

import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from flows.leases import file_lock
from flows.leases.file_lock import (
    hold,
    is_held,
    scratch_directory,
    try_hold,
)
from nanochat_core.errors import StageError


def test_an_error_inside_gives_the_lock_back(tmp_path):
    with pytest.raises(ValueError, match="inside"), hold(tmp_path / "x.lock", pytest.fail):
        raise ValueError("inside")
    assert not is_held(tmp_path / "x.lock")


def test_a_place_that_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StageError, match="cannot be written: ") as caught,
        hold(tmp_path / "file" / "x.lock", pytest.fail),
    ):
        pass
    assert "NANOCHAT_HOME" in (caught.value.hint or "")


def test_a_lock_is_held_only_if_it_is_free(tmp_path):
    path = tmp_path / "sft" / "x.lock"
    with try_hold(path) as first, try_hold(path) as second:
        assert (first, second) == (True, False)
        assert is_held(path)
    assert not is_held(path)
    with try_hold(path) as again:
        assert again


def test_a_scratch_directory_goes_and_that_of_a_killed_process_with_the_next(tmp_path):
    home = tmp_path / "home"  # which does not exist in a fresh checkout
    with scratch_directory(home):
        pass
    (home / "scratch-killed" / "below").mkdir(parents=True)
    with scratch_directory(home) as first, scratch_directory(home) as second:
        assert {*home.glob("scratch-*")} == {first, second}
    assert not [*home.glob("scratch-*")]


def test_a_scratch_directory_of_a_process_that_has_just_made_it_stays(tmp_path, monkeypatch):
    def make_slowly(**options):
        made = TemporaryDirectory(**options)
        if other.ident is None:
            Path(made.name, "begun").touch()
            other.start()
            other.join(0.3)
        return made

    def use() -> None:
        with scratch_directory(tmp_path):
            pass

    other = threading.Thread(target=use)
    monkeypatch.setattr(file_lock, "TemporaryDirectory", make_slowly)
    with scratch_directory(tmp_path) as scratch:
        other.join()
        assert is_held(scratch / "lock")
        assert (scratch / "begun").exists()
