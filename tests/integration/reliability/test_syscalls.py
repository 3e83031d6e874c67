"""A commit to a directory is stopped at a sample of its calls; see tests/campaigns.

There it is stopped at each. Of one to S3 test_simulation.py covers every request.
"""

from pathlib import Path

from infra.storage.local import LocalStore
from tests.support.reliability.syscalls import InPlaceStore, disturb, find_calls, stop_commits

FEW = 40  # points


def test_a_commit_stopped_at_a_call_is_whole_or_not_there(tmp_path: Path) -> None:
    number, faults = stop_commits(LocalStore, tmp_path, count=FEW, seed=1)
    assert (number, faults) == (FEW, [])


def test_a_store_that_writes_in_place_is_caught(tmp_path: Path) -> None:
    calls = find_calls(lambda: InPlaceStore(tmp_path / "first"), tmp_path)
    writes = [number for number, name in enumerate(calls) if name == "write"][-12:]
    found = [
        fault
        for nth in writes
        for fault in disturb(lambda n=nth: InPlaceStore(tmp_path / f"{n}"), tmp_path, nth, "killed")
    ]
    assert any(": torn" in fault for fault in found)
