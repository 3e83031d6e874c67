"""What is tried of a store, found where it fails, with its remedy."""

import time
from pathlib import Path

import pytest

from infra.storage.base import Store
from infra.storage.local import LocalStore
from infra.storage.s3 import probe as module
from infra.storage.s3.probe import Finding, probe
from tests.support.infra.storage.fixtures import PART, Rig
from tests.support.infra.storage.misbehaviour import Fault, Kind, Quirk

OF_ALL = ["put", "get", "clock", "list", "parts", "conditions"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small trial, as most tests look at one line of it."""
    monkeypatch.setattr(module, "KEYS", 12)
    monkeypatch.setattr(module, "ROUNDS", 3)
    monkeypatch.setattr(module, "PART", PART)


def findings(store: Store) -> dict[str, Finding]:
    return {finding.name: finding for finding in probe(store)}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["s3", "directory"])
def test_a_good_store_can_do_everything_and_is_left_as_it_was(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_bucket = kind == "s3"
    store = request.getfixturevalue("s3_store") if is_bucket else LocalStore(tmp_path / "store")
    store.put("before", b"x")
    found = findings(store)
    assert list(found) == [*OF_ALL, "delete"]
    assert {finding.state for finding in found.values()} == {"ok"}
    assert "all of 12 keys" in found["list"].found
    assert [entry.key for entry in store.list("")] == ["before"]


def test_nothing_more_is_tried_of_a_store_that_cannot_be_used(tmp_path: Path) -> None:
    (finding,) = probe(LocalStore(tmp_path / "not-mounted" / "store"))
    assert finding.state == "fail"
    assert "not-mounted does not exist" in finding.found
    assert "mount the disk" in (finding.remedy or "")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("way", "name", "state", "says", "remedy"),
    [
        (Quirk.REFUSES_IF_MATCH, "conditions", "fail", "refuses If-Match", "a directory"),
        (Quirk.FORGETS_IN_LISTS, "list", "fail", "6 of 12 keys are not listed", "garbage"),
        (Quirk.LISTS_UNSORTED, "list", "fail", "lists '", "in order"),
        (Quirk.IGNORES_RANGES, "parts", "fail", "the whole object", "reads ranges"),
        (Quirk.SENDS_NO_DATE, "clock", "fail", "no Date header", "another store"),
        (Fault(kind=Kind.FLIP, verb="GET"), "get", "fail", "other bytes", "another store"),
        (Fault(kind=Kind.FLIP, verb="GET"), "parts", "fail", "damaged", "another store"),
        (
            Fault(kind=Kind.REFUSE, verb="POST uploads", status=501, code="NotImplemented"),
            *("parts", "fail", "NotImplemented", "another store"),
        ),
        (
            Fault(kind=Kind.REFUSE, verb="GET list-type", status=403, code="AccessDenied"),
            *("list", "fail", "AccessDenied", "ListBucket"),
        ),
        (
            Fault(kind=Kind.REFUSE, verb="DELETE", status=403, code="AccessDenied"),
            *("delete", "fail", "AccessDenied", "allow deleting"),
        ),
        (
            Fault(kind=Kind.REFUSE, verb="GET", status=404, code="NoSuchKey"),
            *("get", "fail", "was just put", "another store"),
        ),
    ],
)
def test_what_a_store_cannot_do_is_found_with_its_remedy(
    rig: Rig, way: Quirk | Fault, name: str, state: str, says: str, remedy: str
) -> None:
    found = findings(rig.misbehave(way).store)
    assert found[name].state == state, found[name]
    assert says in found[name].found
    assert remedy in (found[name].remedy or "")
    wrong = {finding.name for finding in found.values() if finding.state != "ok"}
    if isinstance(way, Quirk) and name != "clock":  # versions are read with their age
        assert wrong == {name}, "the other lines do not suffer"
        assert [key for key in rig.objects if "_trials" in key] == []


@pytest.mark.usefixtures("few")
def test_a_listing_that_needs_one_more_request_is_no_finding(rig: Rig) -> None:
    found = findings(rig.misbehave(Quirk.LISTS_1000_SILENTLY).store)
    assert {finding.state for finding in found.values()} == {"ok"}


def test_the_setting_that_may_help_is_named(rig: Rig) -> None:
    (finding,) = probe(rig.misbehave(Quirk.REFUSES_MD5).store)
    assert finding.state == "fail"
    assert "NANOCHAT_S3_ADDRESSING" in (finding.remedy or "")
    assert rig.objects == {}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("offset", "side"), [(-1000, "ahead of"), (1000, "behind")], ids=["ahead", "behind"]
)
def test_a_clock_that_differs_is_a_warning(rig: Rig, offset: int, side: str) -> None:
    rig.now = lambda: time.time() + offset
    found = findings(rig.store)["clock"]
    assert (found.state, side in found.found) == ("warn", True)
    assert "NTP" in (found.remedy or "")


@pytest.mark.usefixtures("few")
def test_a_store_whose_own_clocks_differ_is_a_failure(rig: Rig) -> None:
    times = iter(range(0, 10**9, 1000))
    rig.now = lambda: float(next(times))
    found = findings(rig.store)["clock"]
    assert found.state == "fail"
    assert "a new object is" in found.found
