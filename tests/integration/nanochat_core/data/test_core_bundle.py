import hashlib
import io
import json
import random
import socket
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


@pytest.mark.parametrize("files", [FILES, bare()])
def test_a_bundle_is_unpacked_without_the_folder_that_holds_it(tmp_path, files):
    assert unpacked(tmp_path, zip_of(files)) == (3, bare())
    assert list((tmp_path / "scratch").iterdir()) == []


def test_folders_and_what_macs_leave_are_nothing(tmp_path):
    junk = {"eval_bundle/": b"", "__MACOSX/eval_bundle/._core.yaml": b"x", ".DS_Store": b"x"}
    assert unpacked(tmp_path, zip_of({**junk, **FILES})) == (3, bare())


def test_it_takes_the_place_of_what_was_there(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "old").write_text("x")
    assert unpacked(tmp_path, zip_of(FILES))[1] == bare()


def entry(name, kind):
    info = zipfile.ZipInfo(name)
    info.external_attr = (kind | 0o644) << 16
    info.create_system = 3
    return info


def claims(data, *, size):
    """The archive with another size of its last file in the directory at its end."""
    position = data.rindex(b"PK\x01\x02")
    return data[: position + 24] + size.to_bytes(4, "little") + data[position + 28 :]


@pytest.mark.parametrize("name", ["../x", "eval_bundle/../core.yaml", "/etc/x"])
def test_a_name_outside_of_the_archive_is_refused(tmp_path, name):
    refused(
        f"the archive has '{name}' outside of it", unpacked, tmp_path, zip_of(FILES | {name: b"x"})
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.zip", "scratch"]


@pytest.mark.parametrize("again", ["eval_bundle/core.yaml", "eval_bundle/./core.yaml"])
def test_a_name_that_comes_twice_is_refused(tmp_path, again):
    data = zip_of(FILES | {again.replace("core", "c0re"): b"x"}).replace(b"c0re", b"core")
    refused(r"the archive has 'eval_bundle/core\.yaml' 2 times", unpacked, tmp_path, data)
    assert not (tmp_path / "core").exists()


@pytest.mark.parametrize("older", [FILES, {"eval_bundle/core.yaml": b"x"}])
def test_a_copy_in_a_folder_does_not_replace_the_files_at_the_top(tmp_path, older):
    old = {name.replace("eval_bundle", "old"): b"older" for name in older}
    assert unpacked(tmp_path, zip_of(old | bare())) == (3 + len(old), old | bare())


@pytest.mark.parametrize("name", ["..\\x", "C:/x"])
def test_nothing_is_written_outside_of_the_folder(tmp_path, name):
    assert unpacked(tmp_path, zip_of({**FILES, name: b"x"}))[0] == 4
    inside = tmp_path / "core"
    assert {p.name for p in tmp_path.iterdir()} == {"b.zip", "scratch", "core"}
    assert list((tmp_path / "scratch").iterdir()) == []
    assert bare().items() <= tree_of(inside).items()


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_are_plain_files(tmp_path, kind):
    data = zip_of({**FILES, entry("eval_bundle/link", kind): b"/etc/passwd"})
    assert unpacked(tmp_path, data) == (4, {**bare(), "link": b"/etc/passwd"})
    assert not (tmp_path / "core" / "link").is_symlink()


def test_a_password_and_a_file_inside_a_file_are_refused(tmp_path):
    data = bytearray(zip_of(FILES))
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    refused("cannot be unpacked: .* password", unpacked, tmp_path, bytes(data))
    nested = zip_of({**FILES, "eval_bundle/core.yaml/x": b"x"})
    refused("cannot be unpacked", unpacked, tmp_path, nested)


def test_too_much_is_refused_by_what_it_says_and_by_what_it_is(tmp_path, monkeypatch):
    data = zip_of(FILES)
    monkeypatch.setattr(core_bundle, "MAX_BYTES", 150_000)
    complaint = r"unpacks to 200,0.* bytes, at most 150,000 may"
    refused(complaint, unpacked, tmp_path, data, hint="task_data.core_bundle=null")
    refused("cannot be unpacked: Bad CRC-32", unpacked, tmp_path, claims(data, size=1000))
    assert not (tmp_path / "core").exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"<html>sign in</html>", zip_of(FILES)[:-100], zip_of(FILES)[:5000]],
    ids=["empty", "page", "short", "shorter"],
)
def test_what_is_no_whole_archive_is_refused_and_nothing_is_left(tmp_path, data):
    refused("the archive cannot be unpacked: ", unpacked, tmp_path, data, hint="remove")
    assert not (tmp_path / "core").exists()


def test_a_byte_that_is_another_is_noticed(tmp_path):
    data = bytearray(zip_of(FILES, compression=zipfile.ZIP_STORED))
    data[data.index(QUESTIONS[:50]) + 10] ^= 1
    refused("cannot be unpacked: Bad CRC-32", unpacked, tmp_path, bytes(data))


def test_an_archive_of_something_else_is_refused(tmp_path):
    files = {name: data for name, data in FILES.items() if "csv" not in name}
    refused(r"has no eval_meta_data\.csv", unpacked, tmp_path, zip_of(files))


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


def test_a_bundle_is_downloaded_once_for_each_validator(web):
    sha256 = hashlib.sha256(web.data).hexdigest()
    assert [fetch(web), fetch(web)] == [sha256, sha256]
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


@pytest.mark.parametrize("status", [403, 404, 410, 501])
def test_errors_that_will_not_pass_are_reported_at_once(web, waits, status):
    web.answers = [Answer(status=status)] * 9
    refused(f"cannot be downloaded: the server answers {status}", fetch, web)
    assert waits == []


@pytest.mark.parametrize("target", [None, "http://a..b/", "ftp://127.0.0.1/x"])
def test_redirects_without_an_end_or_to_no_host_are_reported_at_once(web, waits, target):
    web.answers = [Answer(status=302, headers={"Location": target or web.url})] * 60
    for ask in (lambda: fetch(web), lambda: ask_validator(web.url, seconds=60)):
        refused("cannot be downloaded: ", ask)
    assert waits == []


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://a/b.zip", "bundle.zip", "file:///etc/passwd", "", "http://host:abc/b.zip"),
        *("https://a..b/b.zip", "https:///b.zip"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_an_address_is_one_of_the_web(url, waits):
    for ask in (
        lambda: fetch_archive(url, validator=None, log=print),
        lambda: ask_validator(url, seconds=1.0),
    ):
        refused(f"^{url} cannot be downloaded: ", ask, hint="check the address")
    assert waits == []


@pytest.mark.usefixtures("hub")
def test_a_refused_connection_is_a_named_error(waits):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
    settings = {"validator": None, "log": print, "hint": "the network"}
    refused(f"{url} cannot be downloaded: ", fetch_archive, url, **settings)
    assert waits == list(errors.WAITS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks4://127.0.0.1:9"),
        *(("HTTP_PROXY", f"{kind}:port") for kind in ("http://host", "other://host")),
        ("SSL_CERT_FILE", "/nothing"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_one_line(web, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    for ask in (lambda: fetch(web), lambda: ask_validator(web.url, seconds=1.0)):
        refused("cannot be downloaded: ", ask, hint=name)


def test_progress_is_logged(web, monkeypatch):
    monkeypatch.setattr(transfers, "SECONDS_BETWEEN_LINES", 0.0)
    lines = []
    fetch(web, log=lines.append)
    assert lines[-1].startswith("downloaded 0 of 0 MB, ")


def section(web, *, sha256=None, datasets=()):
    return TaskDataConfig(datasets=datasets, core_bundle=web.url, core_bundle_sha256=sha256)


def test_the_stage_downloads_the_bundle_once_and_reports_it(web, make_job):
    sha256 = hashlib.sha256(web.data).hexdigest()
    web.answers = [Answer(spoils=True)]
    for name in ("one", "two", "three"):
        job = make_job(
            "task_data",
            {},
            task_data=section(
                web, sha256=sha256, datasets=(dataset("identity", num_train=3, num_test=1),)
            ),
        )
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
