"""Downloads from the Hub: what is verified, resumed, retried and cached, and the errors."""

import errno
import os
import random
import shutil
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import _http

from nanochat_core.data.hub import errors, transfers
from nanochat_core.data.hub.client import download, list_files
from nanochat_core.data.hub.errors import explaining
from nanochat_core.errors import DataError
from tests.support.nanochat_core.data.fixtures import refused

REPOSITORY = "me/data"
SIZE = 200_000
BIG = random.Random(1).randbytes(SIZE)
SMALL = b'{"a": 1}\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Little patience, and small pieces: the client keeps whole ones only when it is cut."""
    monkeypatch.setattr(errors, "WAITS", (0.0, 0.1))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)


@pytest.fixture
def hub(hub):
    """A Hub with a dataset of one file."""
    hub.add(REPOSITORY, {"a.parquet": BIG})
    return hub


def fetch(path):
    """List and download one file."""
    return fetch_all(path)[0]


def fetch_all(pattern="*", *, log=print):
    commit, files = list_files(REPOSITORY, "main", [pattern])
    return download(REPOSITORY, commit, files, log=log)


def cached(server):
    """Files in the client's cache that hold bytes of the dataset."""
    return [p for p in (server.home / "hub").rglob("blobs/*") if p.is_file()]


@pytest.fixture
def no_pauses(monkeypatch):
    """Let neither the client nor we wait before the next attempt."""
    for module in (_http, errors):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))


def test_files_are_listed_at_the_commit_that_a_branch_is_today(hub):
    commit = hub.add(REPOSITORY, {"all/a.parquet": BIG, "all/b.json": SMALL, "c.txt": b""})
    found, files = list_files(REPOSITORY, "main", ["all/*"])
    assert found == commit
    assert [(f.path, f.size) for f in files] == [("all/a.parquet", SIZE), ("all/b.json", 9)]
    complaint = r"has no file like b\*\.parquet at commit"
    refused(complaint, list_files, REPOSITORY, "main", ["*.parquet", "b*.parquet"])


def test_a_new_commit_costs_only_what_is_new_in_it_and_lists_are_cached_with_a_download(hub):
    fetch("a.parquet")
    first = list_files(REPOSITORY, "main", ["*"])[0]
    second = hub.add(REPOSITORY, {"a.parquet": BIG, "b.parquet": BIG[1:]})
    assert fetch("a.parquet").read_bytes() == BIG
    assert [r.file for r in hub.downloads()] == ["a.parquet"]
    before = len(hub.requests)
    assert list_files(REPOSITORY, "main", ["*"])[0] == second != first
    assert len(hub.requests) == before + 1  # which commit it is today
    assert len(list_files(REPOSITORY, first, ["*"])[1]) == 1
    assert len(hub.requests) == before + 1


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("kind", ["api", "head", "bytes"])
@pytest.mark.usefixtures("no_pauses")
def test_what_may_work_in_a_moment_is_asked_again(hub, kind, status):
    hub.fail("", status, kind=kind)
    assert fetch("a.parquet").read_bytes() == BIG
    assert [r.kind for r in hub.requests if r.status == status] == [kind]


@pytest.mark.parametrize(("name", "data"), [("a.parquet", BIG), ("deep/b.json", SMALL)])
def test_a_file_that_is_damaged_on_the_way_is_fetched_once_more(hub, name, data):
    hub.add(REPOSITORY, {name: data})
    hub.spoil(name, times=2)
    refused(f"^{name} of {REPOSITORY} came out wrong twice: it has", fetch, name)
    assert cached(hub) == []
    hub.spoil(name)
    assert fetch(name).read_bytes() == data
    assert len(hub.downloads()) == 4
    assert len(cached(hub)) == 1


def test_a_file_that_was_damaged_in_the_cache_is_fetched_once_more(hub):
    blob = fetch("a.parquet").resolve()
    for wrong in (BIG[:-1], BIG[:-1] + b"\0"):
        blob.write_bytes(wrong)
        assert fetch("a.parquet").read_bytes() == BIG
    assert len(hub.downloads()) == 3


def test_the_token_opens_the_gate_and_never_reaches_the_storage(hub, monkeypatch):
    hub.gate(REPOSITORY, "right")
    for token in ("", "wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        refused(r"me/data is gated: a\.parquet", fetch, "a.parquet", hint="HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "right")
    assert fetch("a.parquet").read_bytes() == BIG
    assert {r.token for r in hub.downloads()} == {None}


NOT_THERE = [
    ("me/nothing", "main", "there is no dataset me/nothing at http://127"),
    ("me/data/x/y", "main", "there is no dataset me/data/x/y"),
    *(("me/data", r, f"me/data has no such revision: revision {r}") for r in ("v2", "0" * 40)),
]


@pytest.mark.parametrize(("repository", "revision", "complaint"), NOT_THERE)
def test_what_is_not_there_is_named(hub, repository, revision, complaint):
    refused(complaint, list_files, repository, revision, ["*"], hint="")


@pytest.mark.parametrize(("status", "kind"), [(429, "bytes"), (403, "bytes"), (500, "head")])
@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_keeps_refusing_is_named(hub, status, kind):
    hub.fail("a.parquet", status, kind=kind, times=None)
    refused(rf"answers {status} for a\.parquet of me/data", fetch, "a.parquet", hint="")
    heads = [request for request in hub.requests if request.kind == "head"]
    assert kind != "head" or len(heads) == 7  # the client's own patience, not multiplied
    hub.heal()
    assert fetch("a.parquet").read_bytes() == BIG
    hub.fail("", 200, kind="api")  # as from a server that is no Hub
    complaint = "revision main of me/data cannot be downloaded"
    refused(complaint, list_files, REPOSITORY, "main", ["*"], hint="HF_ENDPOINT")


@pytest.mark.parametrize("revision", ["main", "0" * 40])
def test_offline_without_a_cache_says_so(hub, monkeypatch, revision):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(errors, "WAITS", (1000.0,))
    complaint = "is not on this machine, and HF_HUB_OFFLINE is set"
    refused(complaint, list_files, REPOSITORY, revision, ["*"])
    assert hub.requests == []


def test_offline_what_the_hubs_own_command_downloaded_is_used(hub, monkeypatch):
    hub.add(REPOSITORY, {"a.parquet": BIG, "b.json": SMALL, "c.parquet": BIG[1:]})
    snapshot_download(REPOSITORY, repo_type="dataset", ignore_patterns=["c*"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert fetch("a.parquet").read_bytes() == BIG
    assert fetch("b.json").read_bytes() == SMALL
    refused(r"c\.parquet of me/data is not on this machine, and HF", fetch, "c.parquet")
    assert len(hub.requests) == before
    for blob in cached(hub):
        blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    for name in ("a.parquet", "b.json"):
        refused(f"{name} has another digest .* HF_HUB_OFFLINE is set", fetch, name)
    assert len(cached(hub)) == 2


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("with_blobs", [False, True])
def test_a_cache_that_was_copied_without_links_is_used(
    hub, monkeypatch, tmp_path, offline, with_blobs
):
    hub.add(REPOSITORY, {"a.parquet": BIG, "b.json": SMALL})
    fetch_all()
    copy = tmp_path / "copy"
    shutil.copytree(hub.home / "hub", copy)  # follows the links
    if not with_blobs:
        for blobs in copy.rglob("blobs"):
            shutil.rmtree(blobs)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(copy))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    found = fetch_all()
    assert [path.is_symlink() for path in found] == [False, False]
    assert [path.read_bytes() for path in found] == [BIG, SMALL]
    assert len(hub.downloads()) == 2
    for path, wrong in zip(found, (BIG[:-1] + b"?", SMALL[:-1] + b"?"), strict=True):
        path.write_bytes(wrong)
        if offline:
            refused(f"{path} has another digest than", fetch, path.name)
            assert path.read_bytes() == wrong
    if not offline:
        assert [path.read_bytes() for path in fetch_all()] == [BIG, SMALL]
        assert len(hub.downloads()) == (2 if with_blobs else 4)


def test_a_server_that_cannot_be_reached_is_named_unless_all_is_here(hub):
    fetch("a.parquet")
    hub.close()
    assert fetch("a.parquet").read_bytes() == BIG
    complaint = f"revision main .* from {hub.endpoint}"
    refused(complaint, list_files, "me/other", "main", ["*"], hint="HF_ENDPOINT")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_refuses_is_named(hub, number):
    complaint = rf"a\.parquet of me/data cannot be written to .*/hub: .*{os.strerror(number)}"
    with pytest.raises(DataError, match=complaint) as error, explaining(REPOSITORY, "a.parquet"):
        raise OSError(number, os.strerror(number), "/there")
    assert "HF_HOME" in (error.value.hint or "")


def test_what_the_disk_has_no_space_for_is_not_begun(hub, monkeypatch):
    fetch("a.parquet")
    hub.add(REPOSITORY, {"a.parquet": BIG, "b.parquet": BIG[1:], "c.json": SMALL})
    disk = SimpleNamespace(free=SIZE + 7)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    refused("0.0 GB of me/data are to be downloaded", fetch_all, hint="HF_HOME")
    assert len(hub.downloads()) == 1
    disk.free += 1  # what an earlier commit had is not counted
    assert [p.read_bytes() for p in fetch_all()] == [BIG, BIG[1:], SMALL]
    shutil.rmtree(hub.home / "hub" / "datasets--me--data" / "snapshots")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    disk.free = 0
    refused("is not on this machine, and HF_HUB_OFFLINE is set", fetch_all)


def test_several_files_come_at_a_time_and_are_counted(hub, monkeypatch):
    monkeypatch.setattr(transfers, "SECONDS_BETWEEN_LINES", 0.0)
    hub.add(REPOSITORY, {f"{i}[1].parquet": BIG[i:] for i in range(6)})
    hub.slow("", 0.1)
    lines = []
    found = fetch_all(log=lines.append)
    assert [path.read_bytes() for path in found] == [BIG[i:] for i in range(6)]
    assert "downloaded 0 of 1 MB, " in lines[0]
    assert lines[-1].startswith("downloaded 1 of 1 MB, ")
