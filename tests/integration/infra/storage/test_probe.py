"""What a store lacks is found where it fails; one without atomic conditional writes is refused."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.storage.base import Store
from infra.storage.local import LocalStore
from infra.storage.s3 import probe as module
from infra.storage.s3.probe import TRIALS, Finding, probe
from nanochat_core.errors import StoreError
from tests.support.flows.senders import make_run, send
from tests.support.infra.storage.fixtures import PART, Rig
from tests.support.infra.storage.misbehaviour import Fault, Kind, Quirk

OF_ALL = ["put", "get", "parts", "conditions", "list", "delete"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small trial, as most tests look at one line of it."""
    monkeypatch.setattr(module, "KEYS", 12)
    monkeypatch.setattr(module, "PART", PART)


def findings(store: Store) -> dict[str, Finding]:
    return {finding.name: finding for finding in probe(store)}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["s3_store", "rig", "directory"])
def test_a_good_store_can_do_everything_and_is_left_as_it_was(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "s") if kind == "directory" else request.getfixturevalue(kind)
    if isinstance(store, Rig):  # whose lists need one more request
        store = store.misbehave(Quirk.LISTS_1000_SILENTLY).store
    store.put("before", b"x")
    found = findings(store)
    assert list(found) == OF_ALL
    assert {finding.state for finding in found.values()} == {"ok"}
    assert "all of 12 keys" in found["list"].found
    assert [entry.key for entry in store.list("")] == ["before"]


def test_nothing_more_is_tried_of_a_store_that_cannot_be_used(tmp_path: Path, rig: Rig) -> None:
    rig.refuse("PUT", 400, "InvalidArgument")
    stores = LocalStore(tmp_path / "not-mounted" / "store"), rig.store
    expected = ("mount the disk", "NANOCHAT_S3_ADDRESSING")
    for store, remedy in zip(stores, expected, strict=True):
        (finding,) = probe(store)
        assert finding.state == "fail"
        assert remedy in (finding.remedy or "")
    assert rig.objects == {}


def refusal(verb: str, status: int, code: str) -> Fault:
    return Fault(kind=Kind.REFUSE, verb=verb, status=status, code=code)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("way", "name", "says", "remedy"),
    [
        (Quirk.REFUSES_IF_MATCH, "conditions", "refuses If-Match", "a directory"),
        (Quirk.FORGETS_IN_LISTS, "list", "6 of 12 keys are not listed", "garbage"),
        (Quirk.LISTS_UNSORTED, "list", "lists '", "in order"),
        (Quirk.IGNORES_RANGES, "parts", "the whole object", "reads ranges"),
        (Fault(kind=Kind.FLIP, verb="GET"), "get", "other bytes", "another store"),
        (Fault(kind=Kind.FLIP, verb="GET"), "parts", "damaged", "another store"),
        (
            refusal("POST uploads", 501, "NotImplemented"),
            "parts",
            "NotImplemented",
            "another store",
        ),
        (refusal("GET list-type", 403, "AccessDenied"), "list", "AccessDenied", "ListBucket"),
        (refusal("DELETE", 403, "AccessDenied"), "delete", "AccessDenied", "DeleteObject"),
        (refusal("GET", 404, "NoSuchKey"), "get", "was just put", "another store"),
    ],
)
def test_what_a_store_cannot_do_is_found_with_its_remedy(
    rig: Rig, way: Quirk | Fault, name: str, says: str, remedy: str
) -> None:
    found = findings(rig.misbehave(way).store)
    assert found[name].state == "fail", found[name]
    assert says in found[name].found
    assert remedy in (found[name].remedy or "")
    if isinstance(way, Quirk):
        assert {finding.name for finding in found.values() if finding.state != "ok"} == {name}
        assert [key for key in rig.objects if TRIALS in key] == []


NONE_MATCH, MATCH = "does not apply If-None-Match atomically", "does not apply If-Match atomically"
MISSING: dict[tuple[Quirk, ...], str] = {
    (Quirk.IGNORES_IF_NONE_MATCH,): NONE_MATCH,
    (Quirk.RACY_IF_NONE_MATCH,): NONE_MATCH,
    (Quirk.REFUSES_IF_NONE_MATCH,): "refuses If-None-Match",
    (Quirk.IGNORES_IF_MATCH,): MATCH,
    (Quirk.RACY_IF_MATCH,): MATCH,
    (Quirk.REFUSES_IF_MATCH,): "refuses If-Match",
    (Quirk.REFUSES_QUOTED_VERSIONS,): "refuses If-Match",
    (Quirk.REFUSES_IF_NONE_MATCH, Quirk.REFUSES_IF_MATCH): (
        "refuses If-None-Match and refuses If-Match"
    ),
}


@pytest.mark.parametrize("quirks", MISSING, ids=lambda quirks: "+".join(q.name for q in quirks))
def test_a_store_that_lacks_a_guarantee_can_be_read_and_is_refused_with_its_name(
    rig: Rig, quirks: tuple[Quirk, ...]
) -> None:
    store = rig.misbehave(*quirks).store
    for write in (
        lambda: store.put_if_absent("a", b"1"),
        lambda: store.put_if_same("a", b"1", version="0" * 32),
        store.check_conditions,
    ):
        with pytest.raises(StoreError) as caught:
            write()
        assert str(caught.value) == (
            f"store {store.url} has no atomic conditional writes: it {MISSING[quirks]}"
        )
        assert "If-None-Match and If-Match atomically (AWS, " in (caught.value.hint or "")
    assert rig.objects == {}
    store.put("a", b"x")
    assert store.get("a") == store.get_stored("a").data == b"x"
    assert [entry.key for entry in store.list("")] == ["a"]


def test_a_push_is_refused_before_a_file_is_sent(rig: Rig, tmp_path: Path) -> None:
    source = LocalStore(tmp_path / "source")
    make_run(source, tmp_path)
    with pytest.raises(StoreError, match=r"no atomic conditional writes: it refuses If-Match$"):
        send(source, rig.misbehave(Quirk.REFUSES_IF_MATCH).store, "tiny")
    assert rig.objects == {}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=Kind.LOSE, verb="PUT", every=2),
        Fault(kind=Kind.FLIP_REQUEST, verb="PUT", every=2),
        Fault(kind=Kind.REFUSE, every=3),
        Fault(kind=Kind.REFUSE, verb="PUT", every=2, status=409, code="OperationAborted"),
        Fault(kind=Kind.PAGE, verb="PUT", every=5, status=400),
        Fault(kind=Kind.REFUSE, verb="DELETE", every=2),
    ],
    ids=lambda fault: fault.kind.name,
)
def test_a_bad_day_is_not_taken_for_a_bad_store(rig: Rig, fault: Fault) -> None:
    rig.misbehave(fault).store.check_conditions()
    assert rig.objects == {}


def test_a_store_is_probed_once_and_not_before_a_conditional_write(rig: Rig) -> None:
    rig.store.put("a", b"x")
    rig.store.get("a")
    assert rig.count("PUT") == 1
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda n: rig.store.put_if_absent("b", b"%d" % n), range(4))) == 1
    asked = rig.count("PUT", TRIALS)
    assert 20 < asked < 60
    rig.store.put_if_absent("c", b"x")
    rig.store.check_conditions()
    assert rig.count("PUT", TRIALS) == asked


def test_aws_itself_is_not_probed(rig: Rig) -> None:
    rig.store.client.meta._endpoint_url = "https://s3.eu-west-1.amazonaws.com"
    rig.store.check_conditions()
    assert rig.count("PUT") == 0


def test_a_bucket_without_write_permission_can_be_read_and_says_that_access_is_denied(
    rig: Rig,
) -> None:
    rig.store.put("a", b"x")
    rig.refuse("PUT", 403, "AccessDenied")
    assert rig.store.get("a") == b"x"
    with pytest.raises(StoreError, match="AccessDenied"):
        rig.store.check_conditions()
