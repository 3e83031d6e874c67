"""A store without atomic conditional writes: nothing is built in it, and it can be a mirror."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.leases import lease
from infra.storage.local import LocalStore
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.flows.senders import check_same, make_run, send
from tests.infra.storage.fake_s3 import FakeS3
from tests.infra.storage.misbehaviour import Quirk
from tests.infra.storage.s3_server import client_environment

ME = lease.Claimant(owner="me", run="r", host="h", pid=1, home="here", since="")
WEAK = (Quirk.IGNORES_IF_NONE_MATCH, Quirk.REFUSES_IF_MATCH)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    fake = FakeS3(*WEAK)
    for name, value in client_environment(fake.endpoint).items():
        monkeypatch.setenv(name, value)
    yield fake
    fake.stop()


def test_no_lease_is_taken_where_the_store_does_not_decide(fake: FakeS3) -> None:
    with pytest.raises(StoreError, match=r"it ignores If-None-Match.* and refuses If-Match") as e:
        lease.try_acquire(S3Store("s3://fake/x"), "pretrain", "f" * 64, ME, ttl=lease.TTL)
    assert "\n" not in str(e.value)
    assert "`push`, `fetch`, `ls` and `plan` work with this one" in (e.value.hint or "")
    assert fake.objects == {}


def test_a_push_to_it_arrives_and_says_once_what_it_can_be(fake: FakeS3, tmp_path: Path) -> None:
    source, target = LocalStore(tmp_path / "source"), S3Store("s3://fake/x")
    made = make_run(source, tmp_path)
    for number in range(2):
        said: list[str] = []
        send(source, target, "tiny", said=said)
        assert [line.startswith("s3://fake/x can be a mirror") for line in said] == [True]
        for manifest in made:
            check_same(source, target, manifest, tmp_path / f"cache-{number}")
    assert [key for key in fake.objects if "_trials" in key] == []
