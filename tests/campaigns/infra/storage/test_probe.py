"""A real server lists more keys than one answer holds."""

from infra.storage.base import Store
from infra.storage.s3.probe import probe


def test_a_good_server_lists_all_of_1001_keys(s3_store: Store) -> None:
    found = {finding.name: finding for finding in probe(s3_store)}
    assert {finding.state for finding in found.values()} == {"ok"}
    assert "all of 1001 keys" in found["list"].found
