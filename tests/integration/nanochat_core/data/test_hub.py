"""Downloads from the Hub: what is verified, gone on with, asked again, kept, and how it is said."""

import errno
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import _http

from nanochat_core.data.hub import client as hub_module
from nanochat_core.data.hub import transfers
from nanochat_core.data.hub.client import HubFile, download, list_files
from nanochat_core.data.hub.errors import explain
from nanochat_core.data.hub.transfers import run_transfers
from nanochat_core.errors import DataError
from tests.support.nanochat_core.data.hub_server import HubServer

REPOSITORY = "me/data"
SIZE = 200_000
BIG = random.Random(1).randbytes(SIZE)
SMALL = b'{"a": 1}\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little patience, and small pieces: the client keeps whole ones only when it is cut."""
    monkeypatch.setattr(hub_module, "WAITS", (0.0, 0.1))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)


def fetch(path: str, *, revision: str = "main") -> Path:
    """List and download one file."""
    commit, files = list_files(REPOSITORY, revision, [path])
    return download(REPOSITORY, commit, files[0])


def cached(server: HubServer) -> list[Path]:
    """Files in the client's cache that hold bytes of the dataset."""
    return [p for p in (server.home / "hub").rglob("blobs/*") if p.is_file()]


def half_files(server: HubServer) -> list[Path]:
    # Not rglob: a directory that is gone by the time it is listed is an error to it.
    walked = os.walk(server.home / "hub")
    return [Path(at, n) for at, _, names in walked for n in names if n.endswith(".incomplete")]


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let neither the client nor we wait before the next attempt."""
    for module in (_http, hub_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))


def asked(server: HubServer) -> int:
    return len(server.requests)


def test_files_are_listed_at_the_commit_that_a_branch_is_today(hub: HubServer):
    commit = hub.add(REPOSITORY, {"all/a.parquet": BIG, "all/b.json": SMALL, "c.txt": b""})
    found, files = list_files(REPOSITORY, "main", ["all/*"])
    assert found == commit
    assert [(f.path, f.size) for f in files] == [("all/a.parquet", SIZE), ("all/b.json", 9)]
    assert files[0].sha256 is not None
    assert (files[1].sha256, len(files[1].git_id or "")) == (None, 40)


def test_a_long_list_comes_in_pages_and_is_kept(hub: HubServer):
    commit = hub.add(REPOSITORY, {f"{i:03}.txt": b"x" for i in range(250)})
    assert len(list_files(REPOSITORY, "main", ["*"])[1]) == 250
    before = asked(hub)
    assert list_files(REPOSITORY, commit, ["2*.txt"])[1][0].path == "200.txt"
    assert asked(hub) == before
    list_files(REPOSITORY, "main", ["*"])
    assert asked(hub) == before + 1  # which commit it is today


def test_a_list_that_was_damaged_is_fetched_again(hub: HubServer):
    commit = hub.add(REPOSITORY, {"a.parquet": BIG})
    list_files(REPOSITORY, commit, ["*"])
    (kept,) = (hub.home / "assets").rglob(f"{commit}.json")
    other = '{"format": 0, "files": [{"path": "b.parquet", "size": 1, "sha256": null}]}'
    for content in ("", "[]", '{"format": 1}', '{"format": 1, "files": [{"name": "a"}]}', other):
        kept.write_text(content)
        assert [f.path for f in list_files(REPOSITORY, commit, ["*"])[1]] == ["a.parquet"]


def test_a_pattern_that_matches_nothing_is_an_error(hub: HubServer):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    with pytest.raises(DataError, match=r"has no file like b\*\.parquet at commit"):
        list_files(REPOSITORY, "main", ["*.parquet", "b*.parquet"])


@pytest.mark.parametrize(("name", "data"), [("a.parquet", BIG), ("deep/b.json", SMALL)])
def test_a_file_is_downloaded_once(hub: HubServer, name: str, data: bytes):
    hub.add(REPOSITORY, {name: data})
    assert fetch(name).read_bytes() == data
    assert fetch(name).read_bytes() == data
    assert len(hub.downloads()) == 1


def test_a_new_commit_costs_only_what_is_new_in_it(hub: HubServer):
    first = hub.add(REPOSITORY, {"a.parquet": BIG})
    fetch("a.parquet")
    second = hub.add(REPOSITORY, {"a.parquet": BIG, "b.parquet": BIG[1:]})
    assert fetch("a.parquet").read_bytes() == BIG
    assert [r.file for r in hub.downloads()] == ["a.parquet"]
    assert list_files(REPOSITORY, "main", ["*"])[0] == second != first
    assert len(list_files(REPOSITORY, first, ["*"])[1]) == 1


def test_a_connection_that_is_cut_is_resumed_inside_the_file(hub: HubServer):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    hub.cut("a.parquet", after=150_000)
    assert fetch("a.parquet").read_bytes() == BIG
    first, second = hub.downloads()
    assert (first.range, first.sent) == (None, 150_000)
    start = int((second.range or "").removeprefix("bytes=").removesuffix("-"))
    assert 130_000 < start <= 150_000  # whole pieces of 16 KB were kept
    assert second.status == 206
    assert first.sent + second.sent < SIZE + (1 << 14)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("kind", ["api", "head", "bytes"])
def test_what_may_work_in_a_moment_is_asked_again(hub: HubServer, kind, status):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    hub.fail("", status, kind=kind, headers={"Retry-After": "0"})
    assert fetch("a.parquet").read_bytes() == BIG
    assert [r.kind for r in hub.requests if r.status == status] == [kind]


@pytest.mark.parametrize(("name", "data"), [("a.parquet", BIG), ("b.json", SMALL)])
def test_a_file_that_was_damaged_on_the_way_is_fetched_once_more(hub: HubServer, name, data):
    hub.add(REPOSITORY, {name: data})
    hub.spoil(name)
    assert fetch(name).read_bytes() == data
    assert len(hub.downloads()) == 2
    assert len(cached(hub)) == 1


def test_a_file_that_was_damaged_in_the_cache_is_fetched_once_more(hub: HubServer):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    blob = fetch("a.parquet").resolve()
    for wrong in (BIG[:-1], BIG[:-1] + b"\0"):
        blob.write_bytes(wrong)
        assert fetch("a.parquet").read_bytes() == BIG
    assert len(hub.downloads()) == 3


@pytest.mark.parametrize(("name", "data"), [("a.parquet", BIG), ("b.json", SMALL)])
def test_a_file_that_stays_damaged_is_named_and_not_kept(hub: HubServer, name, data):
    hub.add(REPOSITORY, {name: data})
    hub.spoil(name, times=None)
    with pytest.raises(DataError, match=f"{name} of {REPOSITORY} came out wrong twice: it has"):
        fetch(name)
    assert len(hub.downloads()) == 2
    assert cached(hub) == []


def test_a_file_that_is_cut_short_each_time_is_named_and_not_kept(hub: HubServer, monkeypatch):
    commit = hub.add(REPOSITORY, {"a.parquet": BIG})
    monkeypatch.setattr(hub_module, "WAITS", ())
    longer = HubFile(path="a.parquet", size=SIZE + 1, sha256="0" * 64)
    with pytest.raises(DataError, match=r"it has 200,000 bytes, not 200,001"):
        download(REPOSITORY, commit, longer)
    assert cached(hub) == []


def test_the_token_opens_the_gate_and_never_reaches_the_storage(hub: HubServer, monkeypatch):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    hub.gate(REPOSITORY, "right")
    with pytest.raises(DataError, match=r"me/data is gated: a\.parquet") as error:
        fetch("a.parquet")
    assert "HF_TOKEN" in (error.value.hint or "")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(DataError, match=r"me/data is gated: a\.parquet"):
        fetch("a.parquet")
    monkeypatch.setenv("HF_TOKEN", "right")
    assert fetch("a.parquet").read_bytes() == BIG
    assert {r.token for r in hub.requests if r.kind == "head"} == {
        None,
        "Bearer wrong",
        "Bearer right",
    }
    assert {r.token for r in hub.downloads()} == {None}


@pytest.mark.parametrize(
    ("repository", "revision", "path", "complaint"),
    [
        ("me/nothing", "main", "a.parquet", "there is no dataset me/nothing at http://127"),
        ("me/data", "v2", "a.parquet", "me/data has no such revision: revision v2 was asked for"),
        ("me/data", "0" * 40, "a.parquet", "me/data has no such revision: the list of files at 0"),
        ("me/data/x/y", "main", "a.parquet", "'me/data/x/y' cannot be the name of a dataset"),
    ],
)
def test_what_is_not_there_is_named(hub: HubServer, repository, revision, path, complaint):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    with pytest.raises(DataError, match=complaint) as error:
        list_files(repository, revision, [path])
    assert error.value.hint


def test_a_file_that_is_gone_from_its_commit_is_named(hub: HubServer):
    commit = hub.add(REPOSITORY, {"a.parquet": BIG})
    with pytest.raises(DataError, match=r"me/data has no file b\.parquet"):
        download(REPOSITORY, commit, HubFile(path="b.parquet", size=1, sha256="0" * 64))


@pytest.mark.parametrize(
    ("status", "complaint"),
    [
        (429, "limits the rate of requests: a.parquet of me/data has to wait"),
        (500, "answers 500 for a.parquet of me/data"),
        (403, r"refuses a.parquet of me/data \(status 403\)"),
    ],
)
@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_keeps_refusing_is_named(hub: HubServer, status, complaint):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    hub.fail("a.parquet", status, times=None)
    with pytest.raises(DataError, match=complaint) as error:
        fetch("a.parquet")
    assert error.value.hint
    assert "\n" not in str(error.value)
    hub.heal()
    assert fetch("a.parquet").read_bytes() == BIG


@pytest.mark.usefixtures("no_pauses")
def test_the_clients_own_patience_is_not_multiplied(hub: HubServer):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    hub.fail("a.parquet", 500, kind="head", times=None)
    with pytest.raises(DataError, match=r"answers 500 for a\.parquet of me/data"):
        fetch("a.parquet")
    assert len([request for request in hub.requests if request.kind == "head"]) == 7


def test_a_server_that_is_no_hub_is_named(hub: HubServer):
    hub.fail("", 200, kind="api", times=None)
    with pytest.raises(DataError, match="does not answer like a Hub"):
        list_files(REPOSITORY, "main", ["*"])


def test_offline_what_is_in_the_cache_is_used_and_nothing_is_asked(hub: HubServer, monkeypatch):
    hub.add(REPOSITORY, {"a.parquet": BIG, "b.parquet": BIG})
    fetch("a.parquet")
    before = asked(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("a.parquet").read_bytes() == BIG
    with pytest.raises(DataError, match=r"b\.parquet of me/data is not on this machine, and HF"):
        fetch("b.parquet")
    assert asked(hub) == before


@pytest.mark.parametrize("revision", ["main", "0" * 40])
def test_offline_without_a_cache_says_so(hub: HubServer, monkeypatch, revision):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_module, "WAITS", (1000.0,))
    with pytest.raises(DataError, match="is not on this machine, and HF_HUB_OFFLINE is set"):
        list_files(REPOSITORY, revision, ["*"])
    assert hub.requests == []


def test_offline_what_the_hubs_own_command_downloaded_is_used(hub: HubServer, monkeypatch):
    hub.add(REPOSITORY, {"a.parquet": BIG, "b.json": SMALL, "c.parquet": BIG[1:]})
    snapshot_download(REPOSITORY, repo_type="dataset", ignore_patterns=["c*"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("a.parquet").read_bytes() == BIG
    assert fetch("b.json").read_bytes() == SMALL
    with pytest.raises(DataError, match=r"c\.parquet of me/data is not on this machine"):
        fetch("c.parquet")
    for blob in cached(hub):
        blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    for name in ("a.parquet", "b.json"):
        with pytest.raises(DataError, match=f"{name} of me/data is not on this machine"):
            fetch(name)


def test_a_server_that_cannot_be_reached_is_named_unless_all_is_here(hub: HubServer):
    hub.add(REPOSITORY, {"a.parquet": BIG})
    fetch("a.parquet")
    hub.close()
    assert fetch("a.parquet").read_bytes() == BIG
    with pytest.raises(DataError, match=f"{hub.endpoint} cannot be reached for revision") as error:
        list_files("me/other", "main", ["*"])
    assert "HF_ENDPOINT" in (error.value.hint or "")


def test_a_server_that_never_answers_is_not_waited_for_forever(hub: HubServer, monkeypatch):
    monkeypatch.setattr(hub_module, "WAITS", ())
    monkeypatch.setattr(hub_module, "SECONDS_FOR_AN_ANSWER", 0.3)
    hub.add(REPOSITORY, {"a.parquet": BIG})
    hub.slow("", 20.0, kind="api")
    with pytest.raises(DataError, match=r"cannot be reached for revision main .*timed out"):
        fetch("a.parquet")
    assert len(hub.requests) == 1


@pytest.mark.parametrize(
    ("number", "complaint", "hint"),
    [
        (errno.ENOSPC, r"no space left in .*/hub for a\.parquet of me/data", "HF_HOME"),
        (errno.EACCES, r"/there cannot be written, where a\.parquet of me/data goes", "HF_HOME"),
    ],
)
def test_a_disk_that_refuses_is_named(hub: HubServer, number, complaint, hint):
    error = OSError(number, os.strerror(number), "/there")
    found = explain(error, repository=REPOSITORY, what="a.parquet")
    with pytest.raises(DataError, match=complaint):
        raise found
    assert hint in (found.hint or "")


PROCESS = """
import sys
from nanochat_core.data.hub.client import download, list_files

commit, files = list_files("me/data", "main", ["a.parquet"])
print(commit, download("me/data", commit, files[0]))
"""


def test_two_processes_that_want_the_same_file_download_it_once(hub: HubServer):
    commit = hub.add(REPOSITORY, {"a.parquet": BIG})
    hub.slow("a.parquet", 0.2)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env={**os.environ, **hub.environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=120)[0].split() for process in processes]
    assert answers[0] == answers[1]
    assert answers[0][0] == commit
    assert Path(answers[0][1]).read_bytes() == BIG
    assert len(hub.downloads()) == 1


def download_each(commit, files, *, log=print):
    def fetch(file, on_bytes):
        return file.path, download(REPOSITORY, commit, file, on_bytes=on_bytes)

    return run_transfers(fetch, files, size=sum(file.size for file in files), log=log)


def test_several_files_come_at_a_time_and_are_counted(hub: HubServer, monkeypatch):
    monkeypatch.setattr("nanochat_core.data.hub.transfers.SECONDS_BETWEEN_LINES", 0.0)
    commit = hub.add(REPOSITORY, {f"{i}.parquet": BIG[i:] for i in range(6)})
    hub.slow("", 0.1)
    told: list[str] = []
    files = list_files(REPOSITORY, "main", ["*"])[1]
    found = dict(download_each(commit, files, log=told.append))
    assert {name: path.read_bytes() for name, path in found.items()} == {
        f"{i}.parquet": BIG[i:] for i in range(6)
    }
    assert told
    assert "of 1 MB" in told[0]


def test_the_first_error_ends_the_other_downloads(hub: HubServer, monkeypatch):
    monkeypatch.setattr(transfers, "_SECONDS_TO_END", 120.0)  # its thread looks every 2 seconds
    commit = hub.add(REPOSITORY, {f"{i}.parquet": BIG[i:] for i in range(6)})
    hub.slow("1.parquet", 2.0)  # 24 seconds
    hub.fail("0.parquet", 403, times=None)
    files = list_files(REPOSITORY, "main", ["*"])[1]
    with pytest.raises(DataError, match=r"refuses 0\.parquet"):
        list(download_each(commit, files))
    assert not any(path.read_bytes() == BIG[1:] for path in cached(hub))
    assert not [t for t in threading.enumerate() if t.name.startswith("transfer-")]


def test_a_download_that_is_left_ends_soon_and_leaves_no_half_file(hub: HubServer):
    commit = hub.add(REPOSITORY, {f"{i}.parquet": BIG[i:] for i in range(3)})
    hub.slow("1.parquet", 2.0)  # 24 seconds
    files = list_files(REPOSITORY, "main", ["*"])[1]
    results = download_each(commit, files)
    assert next(results)[0] in ("0.parquet", "2.parquet")
    while not half_files(hub):
        time.sleep(0.01)
    results.close()
    while half_files(hub):
        time.sleep(0.01)
    assert not any(path.read_bytes() == BIG[1:] for path in cached(hub))
