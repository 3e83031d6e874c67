"""The lock of a run shows whether a process of this home executes it."""

import threading
from pathlib import Path

import pytest

from flows.leases.run_lock import FINISHED, forget_dead, hold, is_held
from nanochat_core.errors import StageError

STORE = "file:///store"


def dead(home: Path, *, store: str = STORE, is_ended: bool = True) -> list[str]:
    """The runs whose processes have ended, which are forgotten if `is_ended`."""
    found: list[str] = []

    def end(run: str, is_finished: bool) -> bool:
        found.append(f"{run} finished" if is_finished else run)
        return is_ended

    forget_dead(home, store, end)
    return found


def die(home: Path, *runs: str, store: str = STORE) -> None:
    """Leave the locks of these runs as processes that were killed do."""
    for run in runs:
        with pytest.raises(KeyboardInterrupt), hold(home, run, store=store):
            raise KeyboardInterrupt


def test_a_run_is_alive_while_its_lock_is_held_and_leaves_nothing(tmp_path):
    assert not is_held(tmp_path, "tiny-1")
    with hold(tmp_path, "tiny-1", store=STORE):
        assert is_held(tmp_path, "tiny-1")
        assert not is_held(tmp_path, "tiny-2")
        assert dead(tmp_path) == []
        assert is_held(tmp_path, "tiny-1")
    assert not is_held(tmp_path, "tiny-1")
    assert list((tmp_path / "runs").iterdir()) == []
    assert dead(tmp_path) == []


def test_runs_that_ended_by_an_error_are_found_until_they_are_ended(tmp_path):
    die(tmp_path, "tiny-2", "a.b.lock-1", "tiny-1")
    with hold(tmp_path, "tiny-3", store=STORE):
        for _ in range(2):
            assert dead(tmp_path, is_ended=False) == ["a.b.lock-1", "tiny-1", "tiny-2"]
        assert dead(tmp_path) == ["a.b.lock-1", "tiny-1", "tiny-2"]
        assert dead(tmp_path) == []
        assert is_held(tmp_path, "tiny-3")


def test_a_run_that_has_finished_is_found_so_until_it_begins_again(tmp_path):
    with hold(tmp_path, "a", store=STORE, unreported=[FINISHED]):
        pass
    for _ in range(2):
        assert dead(tmp_path, is_ended=False) == ["a finished"]
    die(tmp_path, "a")
    assert dead(tmp_path) == ["a"]
    assert dead(tmp_path) == []


def test_runs_of_another_store_are_left_to_its_commands(tmp_path):
    die(tmp_path, "tiny-1", store="file:///store2")
    die(tmp_path, "tiny-2")
    assert dead(tmp_path) == ["tiny-2"]
    assert dead(tmp_path, store="file:///store2") == ["tiny-1"]


def test_a_run_that_several_processes_execute_lives_until_the_last_has_ended(tmp_path):
    with hold(tmp_path, "tiny-1", store=STORE):
        with hold(tmp_path, "tiny-1", store=STORE):
            pass
        assert is_held(tmp_path, "tiny-1")
        die(tmp_path, "tiny-1")
        assert dead(tmp_path) == []
    assert not (tmp_path / "runs" / "tiny-1.lock").exists()


def test_a_run_that_begins_again_while_its_end_is_recorded_is_alive_afterwards(tmp_path):
    die(tmp_path, "tiny-1")
    has_begun, may_end = threading.Event(), threading.Event()

    def begin_again() -> None:
        with hold(tmp_path, "tiny-1", store=STORE):
            has_begun.set()
            may_end.wait(100)

    thread = threading.Thread(target=begin_again)

    def end(run: str, is_finished: bool) -> bool:
        thread.start()
        assert not has_begun.wait(0.1)  # it waits, and must not take the file that is removed next
        return True

    forget_dead(tmp_path, STORE, end)
    assert has_begun.wait(100)
    assert is_held(tmp_path, "tiny-1")
    assert dead(tmp_path) == []
    may_end.set()
    thread.join()


def test_a_home_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(StageError, match="cannot be written"), hold(tmp_path, "x", store=STORE):
        pass
    assert dead(tmp_path) == []
