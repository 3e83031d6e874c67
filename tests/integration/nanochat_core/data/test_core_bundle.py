import hashlib
import io
import json
import random
import stat
import zipfile
from types import SimpleNamespace

import pytest

from nanochat_core.config import TaskDataConfig
from nanochat_core.data.conversations import task_data
from nanochat_core.data.hub import core_bundle, errors, transfers
from nanochat_core.data.hub.core_bundle import (
    archive_path,
    ask_validator,
    fetch_archive,
    find_archive,
    unpack,
)
from nanochat_core.errors import ConfigError
from nanochat_core.scaling import dataset
from tests.support.nanochat_core.data.fixtures import refused
from tests.support.nanochat_core.data.web_server import Answer, WebServer

QUESTIONS = random.Random(0).randbytes(200_000)
FILES = {
    "eval_bundle/core.yaml": b"icl_tasks: []\n",
    "eval_bundle/eval_meta_data.csv": b"Eval Task,Random baseline\n",
    "eval_bundle/eval_data/world_knowledge/arc.jsonl": QUESTIONS,
}


def zip_of(files, *, compression=zipfile.ZIP_DEFLATED):
    """Names, or entries, with what they hold."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return stream.getvalue()


def tree_of(directory):
    return {
        p.relative_to(directory).as_posix(): p.read_bytes()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def bare(files=None):
    return {name.removeprefix("eval_bundle/"): data for name, data in (files or FILES).items()}


def unpacked(tmp_path, data):
    archive = tmp_path / "b.zip"
    archive.write_bytes(data)
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    count = unpack(archive, tmp_path / "core", scratch=scratch)
    return count, tree_of(tmp_path / "core")


def entry(name, kind):
    info = zipfile.ZipInfo(name)
    info.external_attr = (kind | 0o644) << 16
    info.create_system = 3
    return info


def claims(data, *, size):
    """The archive with another size of its last file in the directory at its end."""
    position = data.rindex(b"PK\x01\x02")
    return data[: position + 24] + size.to_bytes(4, "little") + data[position + 28 :]


JUNK = {"eval_bundle/": b"", "__MACOSX/eval_bundle/._core.yaml": b"x", ".DS_Store": b"x"}
OLD = [{"old/core.yaml": b"x"}, {name.replace("eval_bundle", "old"): b"older" for name in FILES}]
KINDS = (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR)
# What an archive holds, and the files that it becomes.
UNPACKED = [
    *((files, bare()) for files in (FILES, bare(), JUNK | FILES)),
    *((old | bare(), old | bare()) for old in OLD),  # no copy in a folder replaces one at the top
    *((FILES | {entry("eval_bundle/l", k): b"/etc"}, bare() | {"l": b"/etc"}) for k in KINDS),
]


@pytest.mark.parametrize(("files", "expected"), UNPACKED)
def test_a_bundle_is_unpacked_without_the_folder_that_holds_it(tmp_path, files, expected):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "earlier").write_text("x")
    assert unpacked(tmp_path, zip_of(files)) == (len(expected), expected)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert not (tmp_path / "core" / "l").is_symlink()


def test_nothing_is_written_outside_of_the_folder(tmp_path):
    for name in ("..\\x", "C:/x"):
        assert unpacked(tmp_path, zip_of(FILES | {name: b"x"})) == (4, bare())
        assert {p.name for p in tmp_path.iterdir()} == {"b.zip", "scratch", "core"}


def with_byte(data, at, change):
    return data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]


def twice(name):
    return zip_of(FILES | {name.replace("core", "c0re"): b"x"}).replace(b"c0re", b"core")


ZIP, STORED = zip_of(FILES), zip_of(FILES, compression=zipfile.ZIP_STORED)
OUTSIDE = ("../x", "eval_bundle/../core.yaml", "/etc/x")
BROKEN = "the archive cannot be unpacked: "
REFUSED = [
    *((zip_of(FILES | {name: b"x"}), f"archive has '{name}' outside of it") for name in OUTSIDE),
    *((twice(f"eval_bundle/{name}core.yaml"), r"core\.yaml' 2 times") for name in ("", "./")),
    (with_byte(ZIP, ZIP.rindex(b"PK\x01\x02") + 8, 1), f"{BROKEN}.* password"),
    (zip_of({**FILES, "eval_bundle/core.yaml/x": b"x"}), BROKEN),
    *((data, BROKEN) for data in (b"", b"<html>sign in</html>", ZIP[:-100], ZIP[:5000])),
    (with_byte(STORED, STORED.index(QUESTIONS[:50]) + 10, 1), f"{BROKEN}Bad CRC-32"),
    (claims(ZIP, size=1000), f"{BROKEN}Bad CRC-32"),
    (zip_of({n: d for n, d in FILES.items() if "csv" not in n}), r"has no eval_meta_data\.csv"),
]


@pytest.mark.parametrize(("data", "complaint"), REFUSED)
def test_what_cannot_be_used_is_refused_and_nothing_is_left(tmp_path, data, complaint):
    refused(complaint, unpacked, tmp_path, data, hint="remove" if complaint == BROKEN else "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.zip", "scratch"]


def test_too_much_is_refused_by_what_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr(core_bundle, "MAX_BYTES", 150_000)
    complaint = r"unpacks to 200,0.* bytes, at most 150,000 may"
    refused(complaint, unpacked, tmp_path, ZIP, hint="task_data.core_bundle=null")
    assert not (tmp_path / "core").exists()


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """Seconds that were waited for, without waiting."""
    slept = []
    monkeypatch.setattr(errors, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return slept


@pytest.fixture
def web(hub):  # below whose home bundles are cached
    with WebServer(zip_of(FILES)) as server:
        yield server


def fetch(web, *, log=print):
    return fetch_archive(web.url, validator=web.validator, log=log)


def cached(web):
    return sorted(path.name for path in archive_path(web.url).parent.iterdir())


WHOLE = ["bundle.zip", "bundle.zip.json", "lock"]


def test_a_bundle_is_downloaded_once_for_each_validator(web, monkeypatch):
    monkeypatch.setattr(transfers, "SECONDS_BETWEEN_LINES", 0.0)
    log, sha256 = [], hashlib.sha256(web.data).hexdigest()
    assert [fetch(web, log=log.append), fetch(web)] == [sha256, sha256]
    assert log[-1].startswith("downloaded 0 of 0 MB, ")
    assert ask_validator(web.url, seconds=60) == find_archive(web.url).validator == web.validator
    assert web.gets == 1
    web.data = zip_of(FILES, compression=zipfile.ZIP_STORED)
    assert fetch(web) == hashlib.sha256(web.data).hexdigest() == find_archive(web.url).sha256
    assert cached(web) == WHOLE


@pytest.mark.parametrize("answer", [Answer(after=40_000), Answer(status=503), Answer(status=429)])
def test_a_download_that_fails_begins_again_and_then_leaves_what_was_there(web, waits, answer):
    web.answers = [answer] * 3
    fetch(web)
    assert waits == list(errors.WAITS)
    assert archive_path(web.url).read_bytes() == web.data
    web.answers = [answer] * 4
    web.data += b"more"
    refused(f"{web.url} cannot be downloaded: ", fetch, web)
    assert cached(web) == WHOLE
    assert archive_path(web.url).read_bytes() == web.data[: -len(b"more")]


@pytest.mark.parametrize("answer", [403, 404, 410, 501, "", "/", "http://a..b/", "ftp://a/x"])
def test_errors_that_will_not_pass_are_reported_at_once(web, waits, answer):
    """Redirects without an end, or to no host, among them."""
    if isinstance(answer, int):
        web.answers = [Answer(status=answer)]
        refused(f"cannot be downloaded: the server answers {answer}", fetch, web)
    else:
        web.answers = [Answer(status=302, headers={"Location": answer})] * 60
        refused("cannot be downloaded: ", fetch, web)
        refused("cannot be downloaded: ", ask_validator, web.url, seconds=60)
    assert waits == []


CLOSED = "http://127.0.0.1:9/x"
NO_ADDRESS = [
    *("ftp://a/b.zip", "bundle.zip", "file:///etc/passwd", "", "http://host:abc/b.zip"),
    *("https://a..b/b.zip", "https:///b.zip"),
]
NO_PROXY = [
    *(("ALL_PROXY", "socks4://127.0.0.1:9"), ("SSL_CERT_FILE", "/nothing")),
    *(("HTTP_PROXY", f"{kind}:port") for kind in ("http://host", "other://host")),
]


@pytest.mark.parametrize(
    ("url", "variable", "value"),
    [
        *((url, "NO_PROXY", "127.0.0.1") for url in (*NO_ADDRESS, CLOSED)),
        *(("http://127.0.0.1:9/y", *proxy) for proxy in NO_PROXY),
    ],
)
@pytest.mark.usefixtures("hub")
def test_an_address_that_leads_nowhere_and_a_proxy_that_cannot_be_used_are_named(
    url, variable, value, waits, monkeypatch
):
    monkeypatch.setenv(variable, value)
    hint = "check the address, the network" if variable == "NO_PROXY" else variable
    complaint = f"^{url} cannot be downloaded: "
    refused(complaint, fetch_archive, url, validator=None, log=print, hint=hint)
    refused(complaint, ask_validator, url, seconds=1.0, hint=hint)
    assert waits == (list(errors.WAITS) if url == CLOSED else [])


def section(web, *, sha256=None, datasets=()):
    return TaskDataConfig(datasets=datasets, core_bundle=web.url, core_bundle_sha256=sha256)


def test_the_stage_downloads_the_bundle_once_and_reports_it(web, make_job):
    sha256 = hashlib.sha256(web.data).hexdigest()
    web.answers, few = [Answer(spoils=True)], dataset("identity", num_train=3, num_test=1)
    for name in ("one", "two", "three"):
        job = make_job("task_data", {}, task_data=section(web, sha256=sha256, datasets=(few,)))
        task_data.run(job)
        assert tree_of(job.output / "core") == bare(), name
        described = json.loads((job.output / "task_data.json").read_text())
        size = len(web.data)
        assert described["core"] == {"url": web.url, "sha256": sha256, "bytes": size, "files": 3}
        assert not (job.directory / "scratch").exists()
        if name == "two":
            archive_path(web.url).write_bytes(web.data[:-1])
    assert web.gets == 3  # damaged on the way, whole, damaged on the disk


def test_a_bundle_that_is_not_the_one_expected_leaves_nothing(web, make_job):
    job = make_job("task_data", {}, task_data=section(web, sha256="0" * 64))
    refused("expected 000000000000", task_data.run, job, hint="task_data.core_bundle=null")
    assert cached(web) == ["lock"]
    assert web.gets == 2  # once more, since it may be damaged in transit
    assert f"expected {'0' * 64}: it is downloaded again" in job.events.read_text()


def test_what_is_wrong_with_a_bundle_is_said_with_its_address(web, make_job):
    web.data = zip_of({"a/b": b"x"})
    job = make_job("task_data", {}, task_data=section(web))
    refused(rf"^{web.url}: the archive has no core\.yaml$", task_data.run, job)


def test_no_dataset_may_be_called_core(web):
    datasets = [dataset("core")]
    refused("a dataset is called 'core'", section, web, kind=ConfigError, datasets=datasets)
