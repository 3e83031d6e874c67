"""Large bodies carry the cheapest checksum that their store was seen to check."""

from pathlib import Path

import pytest

from infra.storage.s3.checksums import CHECKSUMS, Checksum, algorithm_of, checksum_of
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.fixtures import PARTS, MakeFake, store_on, tried_store_on
from tests.support.infra.storage.misbehaviour import Fault, Kind, Quirk


def test_a_store_that_checks_crc32_gets_it_and_keeps_nothing_of_the_trial(fake: FakeS3) -> None:
    store = store_on(fake)
    assert store.checksum_of_parts() == "crc32"
    requests = len(fake.requests)
    assert store.checksum_of_parts() == "crc32"
    assert len(fake.requests) == requests, "it is tried once"
    assert fake.objects == fake.uploads == {}


@pytest.mark.parametrize(
    "quirk", [Quirk.CHECKS_NO_CRC32, Quirk.CHECKS_NO_CHECKSUMS, Quirk.REFUSES_CRC32]
)
def test_a_store_that_was_not_seen_to_check_it_gets_md5(make_fake: MakeFake, quirk: Quirk) -> None:
    fake = make_fake(quirk)
    assert store_on(fake).checksum_of_parts() == "md5"
    assert fake.objects == fake.uploads == {}


@pytest.mark.parametrize("kind", [Kind.LOSE, Kind.REFUSE_AFTER, Kind.RESET])
def test_a_bad_day_is_not_taken_for_a_store_that_does_not_check(fake: FakeS3, kind: Kind) -> None:
    fake.faults.append(Fault(kind=kind, verb="PUT partNumber", times=2))
    assert store_on(fake).checksum_of_parts() == "crc32"


@pytest.mark.parametrize("status", [500, 409])
def test_a_store_that_stumbles_over_the_trial_every_time_gets_md5(
    fake: FakeS3, status: int
) -> None:
    fake.faults.append(
        Fault(kind=Kind.REFUSE, verb="POST uploads", status=status, code="InternalError", times=8)
    )
    assert store_on(fake).checksum_of_parts() == "md5"


def test_a_store_that_cannot_put_such_parts_together_gets_md5_in_the_last_round(
    fake: FakeS3, large: Path, small_parts: int
) -> None:
    store = tried_store_on(fake)
    fake.faults.append(
        Fault(kind=Kind.REFUSE, verb="POST uploadId", status=400, code="InvalidPart", times=2)
    )
    store.upload("large", large)
    kinds = ["content-md5" in r.headers for r in fake.requests if r.verb == "PUT partNumber"]
    assert kinds == sorted(kinds), "first without, then with"
    assert kinds.count(True) == PARTS


@pytest.mark.parametrize("kind", CHECKSUMS)
def test_what_a_person_asked_for_is_not_tried(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch, kind: Checksum
) -> None:
    monkeypatch.setenv("NANOCHAT_S3_CHECKSUM", kind)
    assert store_on(fake).checksum_of_parts() == kind
    assert fake.requests == []


def test_checksums_are_those_of_the_published_definitions() -> None:
    assert checksum_of(b"123456789", "crc32")["ChecksumCRC32"] == "y/Q5Jg=="  # 0xCBF43926
    assert checksum_of(b"", "md5") == {"ContentMD5": "1B2M2Y8AsgTpgAmY7PhCfg=="}
    assert algorithm_of("md5") == {}
    assert algorithm_of("crc32") == {"ChecksumAlgorithm": "CRC32"}
