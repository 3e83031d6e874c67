"""Large bodies carry the cheapest checksum that their store knows."""

from pathlib import Path

import pytest

from infra.storage.s3.checksums import CHECKSUMS, Checksum, algorithm_of, checksum_of
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.fixtures import PARTS, MakeFake, store_on
from tests.support.infra.storage.misbehaviour import Fault, Kind, Quirk


def kinds_of_parts(fake: FakeS3) -> set[str]:
    names = {"content-md5", "x-amz-checksum-sha256", "x-amz-checksum-crc32"}
    parts = [r for r in fake.requests if r.verb == "PUT partNumber"]
    return {name for part in parts for name in names & part.headers.keys()}


@pytest.mark.parametrize(
    ("quirk", "kind"),
    [
        (None, "x-amz-checksum-crc32"),
        (Quirk.CHECKS_NO_CRC32, "content-md5"),
        (Quirk.CHECKS_NO_CHECKSUMS, "content-md5"),
        (Quirk.REFUSES_CRC32, "content-md5"),
    ],
)
def test_parts_carry_crc32_where_the_store_knows_it(
    make_fake: MakeFake, large: Path, quirk: Quirk | None, kind: str
) -> None:
    fake = make_fake(*[quirk] if quirk else [])
    store_on(fake).upload("large", large)
    assert kinds_of_parts(fake) == {kind}
    assert fake.uploads == {}


@pytest.mark.parametrize("kind", [Kind.LOSE, Kind.REFUSE_AFTER, Kind.RESET])
def test_a_bad_day_is_not_taken_for_a_store_that_does_not_know_it(
    fake: FakeS3, large: Path, kind: Kind
) -> None:
    fake.faults.append(Fault(kind=kind, verb="POST uploads", times=2))
    store_on(fake).upload("large", large)
    assert kinds_of_parts(fake) == {"x-amz-checksum-crc32"}


def test_a_store_that_cannot_put_such_parts_together_gets_md5_in_the_last_round(
    fake: FakeS3, large: Path, small_parts: int
) -> None:
    store = store_on(fake)
    fake.faults.append(
        Fault(kind=Kind.REFUSE, verb="POST uploadId", status=400, code="InvalidPart", times=2)
    )
    store.upload("large", large)
    kinds = ["content-md5" in r.headers for r in fake.requests if r.verb == "PUT partNumber"]
    assert kinds == sorted(kinds), "first without, then with"
    assert kinds.count(True) == PARTS


@pytest.mark.parametrize("kind", CHECKSUMS)
def test_parts_carry_what_a_person_asked_for(
    fake: FakeS3, large: Path, monkeypatch: pytest.MonkeyPatch, kind: Checksum
) -> None:
    monkeypatch.setenv("NANOCHAT_S3_CHECKSUM", kind)
    store_on(fake).upload("large", large)
    name = "content-md5" if kind == "md5" else f"x-amz-checksum-{kind}"
    assert kinds_of_parts(fake) == {name}


def test_checksums_are_those_of_the_published_definitions() -> None:
    assert checksum_of(b"123456789", "crc32")["ChecksumCRC32"] == "y/Q5Jg=="  # 0xCBF43926
    assert checksum_of(b"", "md5") == {"ContentMD5": "1B2M2Y8AsgTpgAmY7PhCfg=="}
    assert algorithm_of("md5") == {}
    assert algorithm_of("crc32") == {"ChecksumAlgorithm": "CRC32"}
