"""One process builds a fingerprint; the others wait, know for whom, and go on when it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flows.lock import Owner, find_owner, hold, lock_path, work_directory
from nanochat_core.errors import StageError

HOLDER = """
import sys, time
from pathlib import Path
from flows.lock import hold

with hold(Path(sys.argv[1]), lambda owner: None):
    print("held", flush=True)
    time.sleep(60)
"""


def start_holder(path: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def nobody_expected(owner: Owner | None) -> None:
    raise AssertionError(f"waited for {owner}")


def test_the_lock_and_the_work_of_a_fingerprint_lie_side_by_side(tmp_path: Path):
    assert lock_path(tmp_path, "sft", "ab" * 32) == tmp_path / "sft" / "abababababab.lock"
    assert work_directory(tmp_path, "sft", "ab" * 32) == tmp_path / "sft" / "abababababab"


def test_a_free_lock_is_taken_at_once_and_given_back(tmp_path: Path):
    path = tmp_path / "sft" / "x.lock"
    for _ in range(2):
        with hold(path, nobody_expected):
            owner = find_owner(path)
            assert owner is not None
            assert owner.pid == os.getpid()
            assert abs(owner.since - time.time()) < 60
        assert find_owner(path) is None


def test_nobody_holds_a_lock_that_was_never_taken(tmp_path: Path):
    assert find_owner(tmp_path / "none" / "x.lock") is None


def test_an_error_inside_gives_the_lock_back(tmp_path: Path):
    with pytest.raises(ValueError, match="inside"), hold(tmp_path / "x.lock", nobody_expected):
        raise ValueError("inside")
    assert find_owner(tmp_path / "x.lock") is None


def test_another_fingerprint_is_not_waited_for(tmp_path: Path):
    with hold(tmp_path / "a.lock", nobody_expected), hold(tmp_path / "b.lock", nobody_expected):
        pass


def test_a_waiter_learns_who_builds_and_goes_on_when_that_process_is_killed(tmp_path: Path):
    path = tmp_path / "x.lock"
    holder = start_holder(path)
    owner = find_owner(path)
    assert owner is not None
    assert owner.pid == holder.pid
    assert str(holder.pid) in str(owner)
    waited_for: list[Owner | None] = []
    taken = threading.Event()

    def wait() -> None:
        with hold(path, waited_for.append):
            taken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert not taken.wait(0.5)
    holder.send_signal(signal.SIGKILL)
    assert taken.wait(5)
    waiter.join()
    holder.communicate()
    assert waited_for == [owner]


def test_a_place_that_cannot_be_written_is_explained(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StageError, match="cannot be written: ") as caught,
        hold(tmp_path / "file" / "x.lock", nobody_expected),
    ):
        pass
    assert "NANOCHAT_HOME" in (caught.value.hint or "")
