"""Hundreds of damaged objects: each is found before it is used. tests/campaigns has thousands."""

from pathlib import Path

import pytest

from flows.artifacts import transfer
from flows.identity import manifest, records
from tests.support.reliability.damage import RECORDS, WRONG, Damages

FEW = 150  # trials


def test_whatever_is_damaged_is_found_before_it_is_used(tmp_path: Path) -> None:
    damages = Damages(tmp_path, seed=1)
    damages.run(FEW)
    assert damages.faults == []
    assert damages.outcomes.total() > FEW * 0.95  # few damages change nothing


def has_wrong(damages: Damages) -> bool:
    """Damage until wrong bytes come out, a thousand times at most."""
    while not (found := any(WRONG in fault for fault in damages.faults)):
        if damages.outcomes.total() >= 1000:
            break
        damages.run(25)
    return found


class Anything(str):
    """A digest that equals every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def test_without_hashing_damaged_files_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control: the campaign finds wrong bytes where there are some."""
    damages = Damages(tmp_path, seed=1)
    monkeypatch.setattr(transfer, "sha256_of", lambda path: Anything())
    assert has_wrong(damages), damages.summary()


def test_without_checksums_damaged_records_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control. Most bits of a record are held by other checks too; the rest gives wrong files."""
    damages = Damages(tmp_path, seed=1, places=RECORDS, kinds=["flip"])
    true = records.fingerprint_of
    for module in (records, manifest):
        monkeypatch.setattr(module, "fingerprint_of", lambda tree: Anything(true(tree)))
    assert has_wrong(damages), damages.summary()
