"""Nothing is built in a store without atomic conditional writes, and nothing is pushed to one."""

from collections.abc import Iterator

import pytest

from infra.storage.local import LocalStore
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.support.flows.senders import make_run, send
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.misbehaviour import Quirk
from tests.support.infra.storage.s3_server import client_environment

WEAK = (Quirk.REFUSES_IF_NONE_MATCH, Quirk.REFUSES_IF_MATCH)
REFUSED = r"^store s3://fake/x has .* it refuses If-None-Match and refuses If-Match$"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    fake = FakeS3(*WEAK)
    for name, value in client_environment(fake.endpoint).items():
        monkeypatch.setenv(name, value)
    yield fake
    fake.stop()


def test_a_push_is_refused_before_a_file_is_sent(fake, tmp_path):
    source = LocalStore(tmp_path / "source")
    make_run(source, tmp_path)
    with pytest.raises(StoreError, match=REFUSED):
        send(source, S3Store("s3://fake/x"), "tiny")
    assert fake.objects == {}
