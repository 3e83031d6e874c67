"""What a store in a bucket asks of its server, how often, and what it makes of bad answers."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.storage.base import ObjectNotFound
from infra.storage.open import open_store
from infra.storage.s3 import client as module
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.support.infra.storage.fake_s3 import Object
from tests.support.infra.storage.fixtures import IMPATIENT, PARTS, Rig
from tests.support.infra.storage.misbehaviour import Fault, Kind, Quirk
from tests.support.infra.storage.s3_server import client_environment
from tests.support.infra.storage.verbs import READS, VERBS

NOWHERE = "http://127.0.0.1:9"


def refused(use: Callable[..., object], *arguments: Any, match: str) -> str:
    """Return the hint of the StoreError that a call raises."""
    with pytest.raises(StoreError, match=match) as caught:
        use(*arguments)
    return caught.value.hint or ""


def test_a_store_in_a_directory_loads_no_botocore(tmp_path: Path) -> None:
    code = (
        "import sys; from infra.storage.open import open_store;"
        f"store = open_store({tmp_path.as_uri()!r}); store.put('a', b'x');"
        "store.check_conditions();"
        "sys.exit(any(name.startswith('boto') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_urls_have_one_form_and_opening_one_asks_nothing(rig: Rig) -> None:
    for url in ("s3://fake", "s3://fake/some/prefix"):
        assert open_store(url).url == open_store(f"{url}/").url == url
    assert rig.requests == []


@pytest.mark.parametrize(
    ("endpoint", "is_aws"),
    [
        ("", True),
        ("https://s3.eu-west-1.amazonaws.com", True),
        ("https://s3.eusc-de-east-1.amazonaws.eu", True),
        ("https://storage.example.com", False),
        ("http://amazonaws.com.example.com:9000/x", False),
    ],
)
def test_addresses_are_those_of_aws_at_aws_only(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, is_aws: bool
) -> None:
    for name, value in client_environment(endpoint).items():
        monkeypatch.setenv(name, value)
    if not endpoint:
        monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    client = module.make_client()
    assert module.is_aws(client) == is_aws
    assert client.meta.config.request_checksum_calculation == "when_required"
    url = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "key"})
    assert ("//bucket." in url) == (not endpoint), "the bucket is in the path of another endpoint"


def test_stores_in_one_bucket_do_not_see_each_other(rig: Rig) -> None:
    one, other = S3Store("s3://fake/team"), S3Store("s3://fake/team2")
    one.put("a", b"one")
    with pytest.raises(ObjectNotFound):
        other.get("a")
    assert list(other.list("")) == []
    assert [entry.key for entry in S3Store("s3://fake").list("")] == ["team/a"]


@pytest.mark.parametrize("verb", ["put", "get", "head", "list", "delete"])
def test_a_store_that_is_down_is_asked_eight_times_and_not_more(rig: Rig, verb: str) -> None:
    rig.store.put("here", b"x")  # it has answered once
    rig.requests.clear()
    rig.refuse(".*", 503, "SlowDown")
    assert refused(VERBS[verb], rig.store, "a", rig.large, match="SlowDown|503")
    assert len(rig.requests) == 8


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("NANOCHAT_S3_ADDRESSING", "odd", "odd is invalid"),
        ("AWS_ENDPOINT_URL_S3", "localhost:9", "Invalid endpoint: localhost:9"),
    ],
)
def test_a_setting_that_is_not_valid_is_reported_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, error: str
) -> None:
    for variable, given in client_environment(NOWHERE).items():
        monkeypatch.setenv(variable, given)
    monkeypatch.setenv(name, value)
    hint = refused(open_store("s3://bucket/x").get, "a", match=f"cannot be opened: .*{error}")
    assert hint.startswith("check AWS_ENDPOINT_URL_S3, which begins with http:// or https://")
    assert "NANOCHAT_S3_ADDRESSING" in hint


def test_an_endpoint_of_awss_configuration_is_used_and_named_in_the_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable, given in client_environment("").items():
        monkeypatch.setenv(variable, given)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    (tmp_path / "config").write_text(f"[default]\nendpoint_url = {NOWHERE}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    get = open_store("s3://bucket/x").get
    assert refused(get, "a", match=NOWHERE).startswith("check endpoint_url in ~/.aws/config")
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE)
    assert refused(get, "a", match=NOWHERE).startswith("check AWS_ENDPOINT_URL, ")


def test_an_answer_that_never_comes_is_asked_for_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 0.3)
    rig.misbehave(Fault(kind=Kind.BLACKHOLE, verb="PUT", times=1))
    rig.store.put("a", b"1")
    assert rig.store.get("a") == b"1"
    assert rig.count("PUT") >= 2  # more on a busy machine


def test_every_body_carries_its_md5(rig: Rig) -> None:
    rig.store.put("a", b"whole")
    rig.store.upload("large", rig.large)
    bodies = [r for r in rig.requests if r.verb in ("PUT", "PUT partNumber")]
    assert len(bodies) == PARTS + 1
    kinds = {"content-md5", "x-amz-checksum-sha256", "x-amz-checksum-crc32"}
    assert all(kinds & set(request.headers) == {"content-md5"} for request in bodies)


def test_an_object_that_vanished_between_a_conflict_and_the_look_is_put_again(rig: Rig) -> None:
    rig.store.check_conditions()
    rig.refuse("PUT", 412, "Precondit", times=1)
    assert rig.store.put_if_absent("a", b"ours")
    assert rig.store.get("a") == b"ours"


def test_what_is_missing_in_a_bucket_that_is_missing_is_an_error(rig: Rig) -> None:
    store = S3Store("s3://nowhere/x", retry_policy=IMPATIENT)
    for use in READS.values():
        hint = refused(use, store, "a", rig.large, match="NoSuchBucket")
        assert "s3 mb s3://nowhere" in hint


def stored(data: bytes) -> Object:
    """Return an object as the server has it."""
    return Object(data=data, etag="e", written=time.time())


def test_more_keys_than_a_page_are_listed_even_if_the_store_hides_them(rig: Rig) -> None:
    keys = [f"k/{n:04}" for n in range(2500)]
    rig.objects |= {f"{rig.store.prefix}{key}": stored(b"x") for key in keys}
    for quirks in (set[Quirk](), {Quirk.LISTS_1000_SILENTLY}, {Quirk.LISTS_WITHOUT_TOKENS}):
        rig.quirks = quirks
        assert [entry.key for entry in rig.store.list("k/")] == keys


@pytest.mark.parametrize(
    ("quirk", "error"),
    [
        (Quirk.LISTS_UNSORTED, "lists 'a' after 'b'"),
        (Quirk.LISTS_MORE_AND_MORE, "more after 'b' and sends nothing"),
    ],
)
def test_a_listing_without_order_or_end_is_an_error(rig: Rig, quirk: Quirk, error: str) -> None:
    for key in "ab":
        rig.store.put(key, b"")
    rig.misbehave(quirk)
    refused(lambda: list(rig.store.list("")), match=error)


def test_what_consoles_make_for_an_empty_folder_is_no_object(rig: Rig) -> None:
    rig.objects |= {rig.store.prefix: stored(b""), f"{rig.store.prefix}runs/": stored(b"")}
    rig.store.put("runs/a", b"")
    assert [entry.key for entry in rig.store.list("")] == ["runs/a"]


def test_ages_are_by_the_stores_clock(rig: Rig) -> None:
    rig.now = lambda: time.time() - 7200  # two hours behind ours
    rig.store.put("a", b"x")
    assert rig.store.get_stored("a").age < 60
    rig.now = lambda: time.time() - 7200 + 500
    assert 490 < rig.store.get_stored("a").age < 560
    rig.now = lambda: time.time() - 9000  # its clock went back
    assert rig.store.get_stored("a").age == 0
    rig.misbehave(Quirk.SENDS_NO_DATE)
    refused(rig.store.get_stored, "a", match="no Date header")
