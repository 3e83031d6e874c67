"""The part `store` of the security campaign, small, and what it finds where a store is trusted."""

import pytest

from infra.storage.s3 import gateways
from tests.campaigns.security import store


def test_no_stranger_and_no_gateway_gets_through() -> None:
    strangers = ("fifo", "linked folder", "linked .tmp")
    rows = store.run(commands=(("ls",), ("status",)), strangers=strangers)
    assert [row.got_through for row in rows] == [(), ()]
    assert all(row.attempts > 20 for row in rows)


def test_answers_that_are_not_looked_at_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "check_answer", lambda verb, status, headers, body: status)
    monkeypatch.setattr("infra.storage.s3.bucket.check_listing", lambda bucket, named: None)
    _, row = store.run(commands=(("ls",),), strangers=())
    assert any("as if the store were empty" in fault for fault in row.got_through)
