"""What a manifest says exists: asked for again while it is not shown, and never larger."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.storage.base import BadObject, ObjectNotFound
from infra.storage.s3.store import S3Store
from tests.infra.storage.conftest import store_on
from tests.infra.storage.fake_s3 import FakeS3
from tests.infra.storage.misbehaviour import Answer, FakeError, Request


def appearing(fake: FakeS3, *, after: int) -> Callable[[Request], Answer]:
    """A server that does not find an object in the first so many requests for one."""
    answer, left = fake.answer, [after]

    def late(request: Request) -> Answer:
        if request.method in ("GET", "HEAD") and request.key and left[0]:
            left[0] -= 1
            raise FakeError(404, "NoSuchKey")
        return answer(request)

    return late


def test_what_a_manifest_says_exists_is_asked_for_again_when_it_is_not_found(
    fake: FakeS3, large: Path, tmp_path: Path
) -> None:
    store, size = store_on(fake), large.stat().st_size
    store.upload("large", large)
    answer = fake.answer
    fake.answer = appearing(fake, after=4)  # twice, a HEAD and a GET for words
    store.fetch("large", tmp_path / "target", size=size)
    assert (tmp_path / "target").read_bytes() == large.read_bytes()
    fake.answer = answer
    fake.answer = appearing(fake, after=3)
    assert store.get("large", size=size) == large.read_bytes()


def test_what_is_gone_for_good_is_missing_after_four_tries_within_seconds(
    fake: FakeS3, tmp_path: Path
) -> None:
    store = S3Store("s3://fake/x")
    store.put("b", b"x")
    for requests, get in (
        (4, lambda: store.get("a", size=1)),
        (8, lambda: store.fetch("a", tmp_path / "target", size=1)),
    ):
        fake.requests.clear()
        started = time.monotonic()
        with pytest.raises(ObjectNotFound):
            get()
        assert time.monotonic() - started < 10, "at most 2.8 s of waiting, on a busy machine"
        assert len(fake.requests) == requests


def test_a_record_that_may_be_absent_is_asked_for_once(fake: FakeS3) -> None:
    store = store_on(fake)
    for find in (store.get, store.get_stored):
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
