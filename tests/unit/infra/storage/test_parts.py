"""Parts cover an object once; a part file is gone on with by its own object only."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.storage import parts
from infra.storage.parts import (
    MAX_PARTS,
    Part,
    PartFile,
    open_part_file,
    part_length,
    plan_parts,
    run_all,
)
from nanochat_core.errors import StoreError


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 700))
def test_parts_cover_an_object_without_gap_or_overlap(size: int, length: int) -> None:
    planned = plan_parts(size, length=length)
    assert [part.index for part in planned] == list(range(len(planned)))
    assert [part.start for part in planned] == [length * part.index for part in planned]
    assert sum(part.length for part in planned) == size
    assert all(part.length == length for part in planned[:-1])


@settings(deadline=None)
@given(st.integers(0, 5 << 40))
def test_an_object_never_has_more_parts_than_stores_allow(size: int) -> None:
    length = part_length(size)
    assert -(-size // length) <= MAX_PARTS
    unit = parts.PART
    assert length == unit or -(-size // (length - unit)) > MAX_PARTS, "larger than need be"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART", 10)


def fill(file: PartFile, pieces: list[Part], data: bytes) -> None:
    for part in pieces:
        file.write(part.start, data[part.start : part.start + part.length])
        file.finish(part)


DATA = bytes(range(35))


def test_an_unfinished_file_resumes_where_it_was(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with open_part_file(final, source="s", version="1", size=35) as file:
        assert len(file.missing) == 4
        fill(file, [file.parts[0], file.parts[3]], DATA)
        file.write(10, b"half")  # of a part that is not finished
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    with open_part_file(final, source="s", version="1", size=35) as file:
        assert [part.index for part in file.missing] == [1, 2]
        fill(file, list(file.missing), DATA)
        file.publish(final)
    assert final.read_bytes() == DATA
    assert final.stat().st_mode & 0o777 == 0o444
    assert list(tmp_path.iterdir()) == [final]


@pytest.mark.parametrize(
    ("source", "version", "size", "boot"),
    [("other", "1", 35, "b"), ("s", "2", 35, "b"), ("s", "1", 34, "b"), ("s", "1", 35, "later")],
)
def test_nothing_of_another_object_or_from_before_a_power_cut_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, version: str, size: int, boot: str
) -> None:
    monkeypatch.setattr(parts, "boot_id", lambda: "b")
    with open_part_file(tmp_path / "model", source="s", version="1", size=35) as file:
        fill(file, list(file.parts), DATA)
    monkeypatch.setattr(parts, "boot_id", lambda: boot)
    with open_part_file(tmp_path / "model", source=source, version=version, size=size) as file:
        assert len(file.missing) == 4


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_lost_its_trailer_before_it_was_renamed_starts_over(
    tmp_path: Path, read_only: bool
) -> None:
    final = tmp_path / "model"
    with open_part_file(final, source="s", version="1", size=35) as file:
        fill(file, list(file.parts), DATA)
    (part,) = tmp_path.iterdir()
    os.truncate(part, 35)
    if read_only:
        part.chmod(0o444)
    with open_part_file(final, source="s", version="1", size=35) as file:
        assert len(file.missing) == 4


def test_two_at_the_same_time_do_not_share_a_file(tmp_path: Path) -> None:
    final = tmp_path / "model"
    with open_part_file(final, source="s", version="1", size=35) as first:
        fill(first, [first.parts[0]], DATA)
        with open_part_file(final, source="s", version="1", size=35) as second:
            assert len(second.missing) == 4
            fill(second, list(second.parts), DATA[::-1])
            second.publish(final)
        fill(first, list(first.missing), DATA)
        first.publish(final)
    assert final.read_bytes() == DATA
    assert list(tmp_path.iterdir()) == [final]


def test_a_file_that_another_process_finished_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "model"
    with open_part_file(final, source="s", version="1", size=35) as file:
        fill(file, list(file.parts), DATA)
    lock = fcntl.flock

    def finish_first(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        with open_part_file(final, source="s", version="1", size=35) as other:
            other.publish(final)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", finish_first)
    with open_part_file(final, source="s", version="1", size=35) as file:
        assert len(file.missing) == 4
        file.write(0, b"not in the other's file")
        assert final.read_bytes() == DATA


def test_an_empty_object_is_an_empty_file(tmp_path: Path) -> None:
    with open_part_file(tmp_path / "empty", source="s", version="1", size=0) as file:
        assert file.missing == []
        file.publish(tmp_path / "empty")
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_full_disk_is_a_store_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_part_file(tmp_path / "model", source="s", version="1", size=35) as file:

        def refuse(*_: object) -> int:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(os, "pwrite", refuse)
        with pytest.raises(StoreError, match="no space left on device") as caught:
            file.write(0, b"x")
    assert "free some space" in (caught.value.hint or "")


def test_a_directory_that_takes_no_file_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object) -> int:
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(os, "open", refuse)  # root may write anywhere
    with (
        pytest.raises(PermissionError),
        open_part_file(tmp_path / "model", source="s", version="1", size=35),
    ):
        pass


def test_work_is_done_on_every_item_a_few_at_a_time() -> None:
    running, most, done = 0, 0, set[int]()
    lock, three = threading.Lock(), threading.Barrier(3)

    def work(item: int, _: threading.Event) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(120)
        with lock:
            running -= 1
            done.add(item)

    with ThreadPoolExecutor(8) as pool:
        run_all(pool, range(30), work, at_once=3)
    assert done == set(range(30))
    assert most == 3


def test_the_first_failure_stops_the_others_and_is_raised() -> None:
    begun: list[int] = []

    def work(item: int, stop: threading.Event) -> None:
        begun.append(item)
        if item == 2:
            raise ValueError("of the third")
        assert stop.wait(120), "not stopped"

    with ThreadPoolExecutor(4) as pool, pytest.raises(ValueError, match="of the third"):
        run_all(pool, range(1000), work, at_once=4)
    assert len(begun) <= 5
