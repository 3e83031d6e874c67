"""A large object is copied in little memory."""

from pathlib import Path

from infra.storage.base import Store
from infra.storage.s3.client import PART
from tests.integration.infra.storage.test_s3_fetches import copy_and_measure


def test_memory_does_not_grow_with_a_gigabyte(s3_store: Store, tmp_path: Path) -> None:
    assert copy_and_measure(s3_store, tmp_path, megabytes=1000, part=PART) < 250
