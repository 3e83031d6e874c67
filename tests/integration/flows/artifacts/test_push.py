"""To S3 and back."""

from pathlib import Path

import pytest

from flows.identity.manifest import Manifest
from infra.storage.local import LocalStore
from tests.support.flows.rows import publish_files
from tests.support.flows.senders import check_same, make_run, send
from tests.support.flows.shelf import put_run


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "source")


@pytest.fixture
def artifacts(source: LocalStore, tmp_path: Path) -> tuple[Manifest, Manifest]:
    return make_run(source, tmp_path)


def test_to_s3_and_back_every_byte_arrives(source, s3_store, artifacts, tmp_path):
    large = publish_files(source, "rows", {"train.rows": bytes(range(256)) * 80_000}, tmp_path)
    put_run(source, "tiny-1", *artifacts, large)
    pushed = send(source, s3_store, "tiny")
    assert pushed.size > 20_000_000
    assert send(source, s3_store, "tiny").items == ()
    back = LocalStore(tmp_path / "back")
    send(s3_store, back, "tiny")
    for manifest in (*artifacts, large):
        check_same(source, s3_store, manifest, tmp_path / "cache-there")
        check_same(source, back, manifest, tmp_path / "cache-back")
