"""What is absent is asked for once, and no object may be larger than its manifest says."""

from pathlib import Path

import pytest

from infra.storage.base import BadObject, ObjectNotFound
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.fixtures import store_on
from tests.support.infra.storage.misbehaviour import Answer, Request


def test_an_object_that_is_absent_is_asked_for_once(fake: FakeS3) -> None:
    store = store_on(fake)
    for find in (store.get, store.get_stored, lambda key: store.get(key, size=9)):
        fake.requests.clear()
        with pytest.raises(ObjectNotFound):
            find("a")
        assert len(fake.requests) == 1


def test_a_body_larger_than_announced_before_writes_nothing_and_is_not_asked_for_again(
    fake: FakeS3, tmp_path: Path
) -> None:
    store, answer = store_on(fake), fake.answer
    store.put("a", b"0123456789")

    def growing(request: Request) -> Answer:
        found = answer(request)
        if request.method == "GET" and request.key:
            found.body *= 1000
        return found

    fake.answer = growing
    fake.requests.clear()
    with pytest.raises(BadObject, match="has 10000 bytes, expected are 10 at most"):
        store.fetch("a", tmp_path / "target", size=10)
    assert fake.count("GET") == 1
    assert all(path.stat().st_size < 1000 for path in tmp_path.iterdir())
