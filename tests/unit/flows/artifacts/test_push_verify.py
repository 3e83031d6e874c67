"""What is damaged in the store that is pushed to is found when it is read, and replaced."""

import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from flows.artifacts.transfer import scratch_name
from flows.identity.manifest import File, Manifest
from infra.storage.base import OnBytes, Store, ignore_bytes
from nanochat_core.errors import ArtifactError
from tests.support.flows.senders import Sink, check_same, send


def damage(store: Store, manifest: Manifest) -> File:
    """Exchange one file's bytes for as many others."""
    file = manifest.files[1]
    store.put(file.key, b"\1" * file.size)
    return file


def test_what_is_damaged_in_the_other_store_is_found_by_reading_it_and_replaced(
    source, target, artifacts, tmp_path
):
    send(source, target, "tiny")
    file = damage(target, artifacts[1])
    target.uploaded.clear()
    shown: list[tuple[str, int]] = []
    counted: list[int] = []

    def watch(what: str, size: int) -> AbstractContextManager[OnBytes]:
        shown.append((what, size))
        return contextlib.nullcontext(counted.append)

    scratch = tmp_path / "scratch"
    pushed = send(source, target, "tiny", scratch=scratch, verify=True, watch=watch)
    whole = sum(f.size for m in artifacts for f in (*m.files, *m.logs))
    assert (pushed.lacking.damaged, len(pushed.lacking.there)) == (1, 5)
    assert target.uploaded == [file.key]
    assert shown == [("verify", whole), ("push", file.size)]
    assert sum(counted) >= whole + file.size
    assert list(scratch.iterdir()) == []
    for manifest in artifacts:
        check_same(source, target, manifest, tmp_path / "cache")


def test_without_reading_damage_in_the_other_store_is_not_seen(source, target, artifacts):
    send(source, target, "tiny")
    file = damage(target, artifacts[1])
    assert send(source, target, "tiny").lacking.items == ()
    assert target.get(file.key) != source.get(file.key)


def test_what_is_whole_there_is_read_and_not_sent(source, target, artifacts):
    send(source, target, "tiny")
    target.uploaded.clear()
    lacking = send(source, target, "tiny", verify=True).lacking
    assert target.uploaded == []
    assert (lacking.items, len(lacking.there), lacking.damaged) == ((), 6, 0)


def test_a_copy_left_of_the_source_is_not_taken_for_the_other_stores(
    source, target, artifacts, tmp_path
):
    send(source, target, "tiny")
    file = damage(target, artifacts[1])
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / scratch_name(file)).write_bytes(source.get(file.key))
    assert send(source, target, "tiny", scratch=tmp_path / "scratch", verify=True).lacking.damaged


def test_nothing_is_replaced_while_the_way_there_damages_what_is_read(
    source, target, artifacts, tmp_path
):
    class Noisy(Sink):
        """Gives other bytes each time."""

        def fetch(
            self, key: str, path: Path, *, size: int, on_bytes: OnBytes = ignore_bytes
        ) -> None:
            path.write_bytes(os.urandom(size))

    send(source, target, "tiny")
    target.uploaded.clear()
    with pytest.raises(ArtifactError, match="not twice the same"):
        send(source, Noisy(tmp_path / "target"), "tiny", scratch=tmp_path / "scratch", verify=True)
    assert target.uploaded == []
