"""A store without atomic conditional writes is refused in one line, and can still be read."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.storage.s3.probe import TRIALS
from nanochat_core.errors import StoreError
from tests.support.infra.storage.fixtures import Rig
from tests.support.infra.storage.misbehaviour import Fault, Kind, Quirk

MISSING: dict[Quirk, str] = {
    Quirk.IGNORES_IF_NONE_MATCH: "ignores If-None-Match",
    Quirk.RACY_IF_NONE_MATCH: "lets several writers with the same If-None-Match win",
    Quirk.REFUSES_IF_NONE_MATCH: "refuses If-None-Match",
    Quirk.IGNORES_IF_MATCH: "ignores If-Match",
    Quirk.RACY_IF_MATCH: "lets several writers with the same If-Match win",
    Quirk.REFUSES_IF_MATCH: "refuses If-Match",
    Quirk.REFUSES_QUOTED_VERSIONS: "refuses If-Match",
}


@pytest.mark.parametrize("quirk", MISSING, ids=lambda quirk: quirk.name)
def test_a_store_that_lacks_a_guarantee_is_refused_with_its_name_and_nothing_stays(
    rig: Rig, quirk: Quirk
) -> None:
    store = rig.misbehave(quirk).store
    for write in (
        lambda: store.put_if_absent("a", b"1"),
        lambda: store.put_if_same("a", b"1", version="0" * 32),
        store.check_conditions,
    ):
        with pytest.raises(StoreError) as caught:
            write()
        assert str(caught.value) == (
            f"store {store.url} has no atomic conditional writes: it {MISSING[quirk]}"
        )
        assert "If-None-Match and If-Match atomically (AWS, " in (caught.value.hint or "")
    assert rig.objects == {}


def test_a_store_that_lacks_both_guarantees_can_still_be_read(rig: Rig) -> None:
    store = rig.misbehave(Quirk.IGNORES_IF_NONE_MATCH, Quirk.REFUSES_IF_MATCH).store
    store.put("a", b"0123456789")
    assert store.get("a") == store.get_stored("a").data == b"0123456789"
    assert [entry.key for entry in store.list("")] == ["a"]
    store.fetch("a", rig.target, size=10)
    assert rig.target.read_bytes() == b"0123456789"
    with pytest.raises(StoreError, match=r"it ignores If-None-Match and refuses If-Match$"):
        store.check_conditions()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=Kind.LOSE, verb="PUT", every=2),
        Fault(kind=Kind.FLIP_REQUEST, verb="PUT", every=2),
        Fault(kind=Kind.REFUSE, every=3),
        Fault(kind=Kind.REFUSE, verb="PUT", every=2, status=409, code="OperationAborted"),
        Fault(kind=Kind.PAGE, verb="PUT", every=5, status=400),
    ],
    ids=lambda fault: fault.kind.name,
)
def test_a_bad_day_is_not_taken_for_a_bad_store(rig: Rig, fault: Fault) -> None:
    rig.misbehave(fault).store.check_conditions()


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


def test_a_probe_deletes_its_objects_although_requests_fail(rig: Rig) -> None:
    rig.misbehave(Fault(kind=Kind.REFUSE, verb="DELETE", every=2)).store.check_conditions()
    assert rig.objects == {}
