"""The part `store` of the security campaign, small, and what it finds where a store is trusted."""

from typing import Any

import pytest

from infra.storage.s3.store import S3Store
from tests.campaigns.security import store


def test_no_stranger_and_no_gateway_gets_through() -> None:
    strangers = ("fifo", "linked folder", "linked .tmp")
    rows = store.run(commands=(("ls",), ("status",)), strangers=strangers)
    assert [row.got_through for row in rows] == [(), ()]
    assert all(row.attempts > 20 for row in rows)


def test_answers_that_are_not_looked_at_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_page(store: S3Store, prefix: str, more: dict[str, str]) -> Any:
        return store.request("list_objects_v2", Prefix=store.prefix + prefix, **more)

    monkeypatch.setattr(S3Store, "_list_page", list_page)
    _, row = store.run(commands=(("ls",),), strangers=())
    assert any("as if the store were empty" in fault for fault in row.got_through)
