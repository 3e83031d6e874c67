"""Kernels of torch.compile that a killed process left unfinished."""

import os
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from infra.launch.compile_cache import VARIABLE, compile_cache, remove_unfinished
from tests.support.infra.launch.toy_jobs import ToyJobs

ENTRY = """
import os

def run(job):
    return {"folder": os.environ["TORCHINDUCTOR_CACHE_DIR"]}
"""


def test_a_job_that_compiles_begins_without_unfinished_kernels(
    jobs: ToyJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch leaves one if it is killed while it links, and would load it as it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    job = jobs.make(ENTRY, compile=True)
    folder = Path(jobs.run(job).metrics["folder"])
    assert folder.is_relative_to(tmp_path / "cache")
    (folder / "short.main.so").write_bytes(b"\177ELF")
    events: list[dict[str, Any]] = []

    jobs.run(job, on_event=events.append)

    (message,) = [event["text"] for event in events if event["kind"] == "message"]
    assert message.startswith("1 unfinished kernel of torch.compile removed")
    assert not (folder / "short.main.so").exists()


@pytest.mark.parametrize("variable", [VARIABLE, "XDG_CACHE_HOME"])
def test_a_cache_that_cannot_be_written_is_replaced_by_one_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(variable, "/proc/cache")

    assert compile_cache(print, fallback=tmp_path) == {VARIABLE: str(tmp_path)}


def test_only_kernels_that_are_not_whole_and_not_being_made_are_removed(tmp_path: Path) -> None:
    whole = Path(os.__file__).parent / "lib-dynload"
    library = next(whole.glob("*.so")).read_bytes()
    folder = tmp_path / "ab"
    folder.mkdir()
    (folder / "whole.main.so").write_bytes(library)
    (folder / "short.main.so").write_bytes(library[:-1])
    (folder / "empty.so").write_bytes(b"")
    (folder / "locked.main.so").write_bytes(library[:1000])
    (folder / "locked.main.cpp").write_bytes(b"")

    with FileLock(tmp_path / "locks" / "locked.lock"):
        assert remove_unfinished(tmp_path) == 2

    assert sorted(path.name for path in folder.iterdir()) == [
        "locked.main.cpp",
        "locked.main.so",
        "whole.main.so",
    ]
