"""Stores that do not decide are found out, and can be mirrors with one writer."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from infra.storage.base import Store
from infra.storage.s3 import conditional
from infra.storage.s3.conditional import ATOMIC, ConditionalWrites, Support
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.infra.storage.conftest import MakeFake, store_on
from tests.infra.storage.fake_s3 import FakeS3
from tests.infra.storage.misbehaviour import Fault, Kind, Quirk

WEAK_CREATES: dict[Quirk, Support] = {
    Quirk.IGNORES_IF_NONE_MATCH: "ignored",
    Quirk.RACY_IF_NONE_MATCH: "racy",
    Quirk.REFUSES_IF_NONE_MATCH: "refused",
}
WEAK_SWAPS: dict[Quirk, Support] = {
    Quirk.IGNORES_IF_MATCH: "ignored",
    Quirk.RACY_IF_MATCH: "racy",
    Quirk.REFUSES_IF_MATCH: "refused",
    Quirk.REFUSES_QUOTED_VERSIONS: "refused",
}


@pytest.mark.parametrize("quirk", [*WEAK_CREATES, *WEAK_SWAPS], ids=lambda quirk: quirk.name)
def test_what_a_store_makes_of_conditions_is_found_out_and_leaves_nothing(
    make_fake: MakeFake, quirk: Quirk
) -> None:
    fake = make_fake(quirk)
    assert store_on(fake).semantics() == ConditionalWrites(
        creates=WEAK_CREATES.get(quirk, "atomic"),
        swaps=WEAK_SWAPS.get(quirk, "atomic"),
    )
    assert fake.objects == {}


def test_a_real_server_decides(s3_store: Store) -> None:
    assert isinstance(s3_store, S3Store)
    assert s3_store.try_conditions(rounds=20) == ATOMIC


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=Kind.LOSE, verb="PUT", every=2),
        Fault(kind=Kind.FLIP_REQUEST, verb="PUT", every=2),
        Fault(kind=Kind.REFUSE, verb="*", every=3),
        Fault(kind=Kind.REFUSE, verb="PUT", every=2, status=409, code="OperationAborted"),
        Fault(kind=Kind.PAGE, verb="PUT", every=5, status=400),
    ],
    ids=lambda fault: fault.kind.name,
)
def test_a_bad_day_is_not_taken_for_a_bad_store(make_fake: MakeFake, fault: Fault) -> None:
    assert store_on(make_fake(fault)).semantics() == ATOMIC


def test_a_store_is_tried_once_and_not_before_it_must_decide(fake: FakeS3) -> None:
    store = store_on(fake)
    store.put("a", b"x")
    store.get("a")
    assert fake.count("PUT") == 1
    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda n: store.put_if_absent("b", b"%d" % n), range(4))) == 1
    asked = fake.count("PUT", conditional.TRIALS)
    assert 20 < asked < 60
    store.put_if_absent("c", b"x")
    assert store.missing_guarantees() == ()
    assert fake.count("PUT", conditional.TRIALS) == asked


def test_aws_itself_is_not_tried(fake: FakeS3) -> None:
    store = store_on(fake)
    store.bucket.list_page("", after=None, token=None)  # connects
    store.bucket._is_aws = True
    assert store.missing_guarantees() == ()
    assert fake.count("PUT") == 0


def test_a_store_that_may_not_be_written_is_an_error_and_not_a_weakness(fake: FakeS3) -> None:
    fake.faults.append(Fault(kind=Kind.REFUSE, verb="PUT", status=403, code="AccessDenied"))
    with pytest.raises(StoreError, match="access denied"):
        store_on(fake).missing_guarantees()


@pytest.mark.parametrize("quirk", [*WEAK_CREATES, *WEAK_SWAPS], ids=lambda quirk: quirk.name)
def test_a_single_writer_decides_on_every_store(make_fake: MakeFake, quirk: Quirk) -> None:
    store = store_on(make_fake(quirk))
    assert store.put_if_absent("a", b"1")
    assert store.put_if_absent("a", b"1")
    assert not store.put_if_absent("a", b"other")
    version = store.get_stored("a").version
    assert store.put_if_same("a", b"2", version=version)
    assert store.put_if_same("a", b"2", version=version)
    assert not store.put_if_same("a", b"3", version=version)
    assert not store.put_if_same("b", b"3", version=version)
    assert store.get("a") == b"2"


def test_a_trial_deletes_its_objects_although_requests_fail(make_fake: MakeFake) -> None:
    fake = make_fake(Fault(kind=Kind.REFUSE, verb="DELETE", every=2))
    store_on(fake).semantics()
    assert fake.objects == {}


def test_versions_go_without_quotes_to_a_store_that_wants_them_so(
    make_fake: MakeFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = make_fake(Quirk.REFUSES_QUOTED_VERSIONS)
    assert store_on(fake).missing_guarantees() == ("refuses If-Match",)
    monkeypatch.setenv("NANOCHAT_S3_ETAG", "plain")
    store = store_on(fake)
    assert store.missing_guarantees() == ()
    store.put("a", b"1")
    assert store.put_if_same("a", b"2", version=store.get_stored("a").version)
