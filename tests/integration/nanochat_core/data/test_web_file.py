import hashlib
import random
import socket
from types import SimpleNamespace

import pytest

from nanochat_core.data.hub import transfers, web_file
from nanochat_core.data.hub.errors import MAX_WAIT, seconds_to_wait
from nanochat_core.data.hub.web_file import ask_validator, download_file, downloaded_validator
from nanochat_core.errors import DataError
from tests.support.nanochat_core.data.web_server import Answer, WebServer

DATA = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def web():
    with WebServer(DATA) as server:
        yield server


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """What was waited for, without waiting."""
    slept = []
    monkeypatch.setattr(web_file, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return slept


def fetch(web, directory, *, sha256=None, log=lambda text: None):
    return download_file(web.url, directory / "b.zip", sha256=sha256, log=log)


def names(directory):
    return sorted(p.name for p in directory.iterdir())


def test_a_file_is_downloaded_once(web, tmp_path):
    for _ in range(2):
        assert fetch(web, tmp_path, sha256=SHA256) == SHA256
    assert (tmp_path / "b.zip").read_bytes() == DATA
    assert web.ranges == [None]


@pytest.mark.parametrize("answers", [1, 5])
def test_a_cut_connection_is_resumed_inside_the_file(web, tmp_path, waits, answers):
    web.answers = [Answer(after=40_000) for _ in range(answers)]
    assert fetch(web, tmp_path) == SHA256
    assert len(web.ranges) == answers + 1
    starts = [int(r.removeprefix("bytes=")[:-1]) for r in web.ranges[1:]]
    assert starts == [40_000 * i for i in range(1, answers + 1)]
    assert waits == [web_file.WAITS[0]] * answers  # each attempt brought something


def test_what_a_killed_process_left_is_resumed(web, tmp_path):
    web.answers = [Answer(after=40_000)]
    web.answers += [Answer(status=500)] * 4
    with pytest.raises(DataError, match="the server answers 500"):
        fetch(web, tmp_path)
    assert names(tmp_path) == ["b.zip.part", "b.zip.part.json"]
    assert fetch(web, tmp_path) == SHA256
    assert web.ranges[-1] == "bytes=40000-"


def test_a_part_that_is_the_whole_needs_no_request(web, tmp_path):
    fetch(web, tmp_path)
    (tmp_path / "b.zip").rename(tmp_path / "b.zip.part")
    assert fetch(web, tmp_path) == SHA256
    assert len(web.ranges) == 1


@pytest.mark.parametrize("checks_validator", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("length", [100_000, 300_000, 20_000])
def test_a_part_of_another_file_is_not_resumed(web, tmp_path, checks_validator, is_known, length):
    web.answers = [Answer(after=40_000), *[Answer(status=503)] * 4]
    with pytest.raises(DataError):
        fetch(web, tmp_path)
    web.data = random.Random(1).randbytes(length)
    web.checks_validator = checks_validator
    sha256 = hashlib.sha256(web.data).hexdigest()
    # A server that ignores If-Range gives itself away by another size or validator.
    assert fetch(web, tmp_path, sha256=sha256 if is_known else None) == sha256
    assert (tmp_path / "b.zip").read_bytes() == web.data


def test_without_a_validator_it_begins_again(web, tmp_path):
    web.has_validator = False
    web.answers = [Answer(after=40_000)]
    assert fetch(web, tmp_path) == SHA256
    assert web.ranges == [None, None]


def test_a_server_that_ignores_ranges_is_taken_from_the_start(web, tmp_path):
    web.answers = [Answer(after=40_000), Answer(ignores_range=True)]
    assert fetch(web, tmp_path) == SHA256


def test_a_server_that_sends_no_length_is_believed(web, tmp_path):
    web.has_length = False
    assert fetch(web, tmp_path) == SHA256


def test_errors_that_may_pass_are_waited_for_as_long_as_the_server_asks(web, tmp_path, waits):
    web.answers = [
        Answer(status=503),
        Answer(status=429, headers={"Retry-After": "7"}),
        Answer(status=429, headers={"Retry-After": "7000"}),
    ]
    assert fetch(web, tmp_path) == SHA256
    assert waits == [web_file.WAITS[0], 7.0, MAX_WAIT]


@pytest.mark.parametrize(
    ("asked", "seconds"), [("7", 7.0), ("86400", MAX_WAIT), ("\u00b2", 1.5), ("Fri, 1 Jan", 1.5)]
)
def test_the_hub_is_waited_for_no_longer_than_a_minute(asked, seconds):
    error = Exception()
    error.response = SimpleNamespace(headers={"Retry-After": asked})
    assert seconds_to_wait(error, 1.5) == seconds


@pytest.mark.parametrize("status", [403, 404, 410, 501])
def test_errors_that_will_not_pass_are_reported_at_once(web, tmp_path, waits, status):
    web.answers = [Answer(status=status)] * 9
    with pytest.raises(DataError, match=f"/bundle.zip cannot be downloaded: the .* {status}"):
        fetch(web, tmp_path)
    assert waits == []


@pytest.mark.parametrize("target", [None, "http://a..b/", "ftp://127.0.0.1/x"])
def test_redirects_without_an_end_or_to_no_host_are_reported_at_once(web, tmp_path, waits, target):
    web.answers = [Answer(status=302, headers={"Location": target or web.url})] * 60
    with pytest.raises(DataError, match="cannot be downloaded: "):
        fetch(web, tmp_path)
    with pytest.raises(DataError, match="cannot be downloaded: "):
        ask_validator(web.url, seconds=60)
    assert waits == []


def test_a_damaged_file_is_fetched_once_more_and_then_refused(web, tmp_path):
    web.answers = [Answer(spoils=True)]
    assert fetch(web, tmp_path, sha256=SHA256) == SHA256
    (tmp_path / "b.zip").unlink()
    web.answers = [Answer(spoils=True)] * 2
    with pytest.raises(DataError, match=f"has sha256 .*, expected {SHA256[:12]}"):
        fetch(web, tmp_path, sha256=SHA256)
    assert not (tmp_path / "b.zip").exists()


def test_a_file_that_was_spoiled_on_disk_is_fetched_again(web, tmp_path):
    fetch(web, tmp_path)
    (tmp_path / "b.zip").write_bytes(DATA[:-1])
    assert fetch(web, tmp_path) == SHA256
    assert (tmp_path / "b.zip").read_bytes() == DATA


def test_a_kept_file_of_another_sha256_than_the_one_wanted_is_fetched_again(web, tmp_path):
    fetch(web, tmp_path)
    web.data = DATA[::-1]
    assert fetch(web, tmp_path) == SHA256  # nothing else was asked for
    sha256 = hashlib.sha256(web.data).hexdigest()
    assert fetch(web, tmp_path, sha256=sha256) == sha256


def test_the_validator_is_that_of_the_file_not_of_a_later_attempt(web, tmp_path):
    fetch(web, tmp_path)
    validator = web.validator
    web.data = DATA[::-1]
    with pytest.raises(DataError):
        fetch(web, tmp_path, sha256="0" * 64)
    assert downloaded_validator(tmp_path / "b.zip") == validator


def test_a_refused_connection_is_a_named_error(tmp_path, waits):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(DataError, match=f"http://127.0.0.1:{port}/x cannot be downloaded: ") as e:
        download_file(f"http://127.0.0.1:{port}/x", tmp_path / "x", sha256=None, log=print)
    assert waits == list(web_file.WAITS)
    assert "run again" in (e.value.hint or "")


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://a/b.zip", "bundle.zip", "file:///etc/passwd", "", "http://host:abc/b.zip"),
        *("https://a..b/b.zip", "https:///b.zip"),
    ],
)
def test_an_address_is_one_of_the_web(url, tmp_path):
    with pytest.raises(DataError, match="is no address of a file"):
        download_file(url, tmp_path / "x", sha256=None, log=print)
    with pytest.raises(DataError, match="is no address of a file"):
        ask_validator(url, seconds=1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks4://127.0.0.1:9"),
        *(("HTTP_PROXY", f"{kind}:port") for kind in ("http://host", "other://host")),
        ("SSL_CERT_FILE", "/nothing"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_one_line(web, tmp_path, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match="no request can be sent: ") as error:
        fetch(web, tmp_path)
    assert name in (error.value.hint or "")
    with pytest.raises(DataError, match="no request can be sent: "):
        ask_validator(web.url, seconds=1.0)


def test_how_far_it_is_is_reported(web, tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, "SECONDS_BETWEEN_LINES", 0.0)
    told = []
    fetch(web, tmp_path, log=told.append)
    assert told[-1].startswith("downloaded 0 of 0 MB, ")
