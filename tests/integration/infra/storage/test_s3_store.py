"""What a store in a bucket asks of its server, how often, and what it makes of bad answers."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.storage.base import ObjectNotFound
from infra.storage.open import open_store
from infra.storage.s3 import client as module
from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.support.infra.storage.fake_s3 import FakeS3, Object
from tests.support.infra.storage.fixtures import IMPATIENT, PARTS, MakeFake, store_on
from tests.support.infra.storage.misbehaviour import Fault, Kind, Quirk
from tests.support.infra.storage.s3_server import client_environment

DOWN = Fault(kind=Kind.REFUSE, verb=".*")


def test_opening_a_store_asks_nothing(fake: FakeS3) -> None:
    assert open_store("s3://fake/some/prefix").url == "s3://fake/some/prefix"
    assert fake.requests == []


def test_a_store_in_a_directory_loads_no_botocore(tmp_path: Path) -> None:
    code = (
        "import sys; from infra.storage.open import open_store;"
        f"store = open_store({tmp_path.as_uri()!r}); store.put('a', b'x');"
        "store.check_conditions();"
        "sys.exit(any(name.startswith('boto') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "url",
    [
        *("s3://", "s3:///prefix", "s3://UPPER/x", "s3://ab", "s3://bucket/a/../b"),
        *("s3://bucket/.hidden", "s3://bucket/a b", "s3://bucket/a?region=x", "s3://bucket/a#b"),
    ],
)
def test_a_url_that_is_no_bucket_says_what_one_looks_like(url: str) -> None:
    with pytest.raises(StoreError, match=r"unsupported store URL|cannot be a key"):
        open_store(url)


@pytest.mark.parametrize("name", ["b", "UPPER", "-ab", "a" * 64])
def test_a_name_that_no_bucket_can_have_is_answered_with_what_names_can_be(name: str) -> None:
    with pytest.raises(StoreError, match=f"unsupported store URL 's3://{name}/prefix'") as caught:
        open_store(f"s3://{name}/prefix")
    assert "3 to 63 lower-case letters" in (caught.value.hint or "")


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(StoreError, match="cannot hold credentials") as caught:
        open_store("s3://AKIAEXAMPLE:geheim@bucket/prefix")
    assert "geheim" not in f"{caught.value} {caught.value.hint}"
    assert "AWS_SECRET_ACCESS_KEY" in (caught.value.hint or "")


def test_urls_have_one_form(fake: FakeS3) -> None:
    assert open_store("s3://fake").url == open_store("s3://fake/").url == "s3://fake"
    assert open_store("s3://fake/a/b/").url == "s3://fake/a/b"


def test_the_endpoint_of_all_services_is_honoured_too(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", fake.endpoint)
    store_on(fake).put("a", b"x")
    assert [request.bucket for request in fake.requests] == ["fake"], "the bucket is in the path"


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


def test_stores_in_one_bucket_do_not_see_each_other(fake: FakeS3) -> None:
    one, other = S3Store("s3://fake/team"), S3Store("s3://fake/team2")
    one.put("a", b"one")
    with pytest.raises(ObjectNotFound):
        other.get("a")
    assert list(other.list("")) == []
    assert [entry.key for entry in S3Store("s3://fake").list("")] == ["team/a"]


@pytest.mark.parametrize(
    ("verb", "uses"),
    [
        ("PUT", lambda store: store.put("a", b"x")),
        ("GET", lambda store: store.get("a")),
        ("HEAD", lambda store: store.head("a")),
        ("GET list-type", lambda store: list(store.list(""))),
        ("DELETE", lambda store: store.delete("a")),
    ],
)
def test_a_store_that_is_down_is_asked_eight_times_and_not_more(
    fake: FakeS3, verb: str, uses: Callable[[S3Store], object]
) -> None:
    store = store_on(fake)
    store.put("here", b"x")  # it has answered once
    fake.faults.append(DOWN)
    fake.requests.clear()
    with pytest.raises(StoreError, match=r"(SlowDown|503).*\(8 tries in \d+ s\)") as caught:
        uses(store)
    assert fake.count(verb) == len(fake.requests) == 8
    assert caught.value.hint


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment with keys and no endpoint."""
    for name, value in client_environment("").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    return monkeypatch


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
@pytest.mark.parametrize("endpoint", ["127.0.0.1:9", "localhost:9"])
def test_an_endpoint_without_http_is_answered_with_what_is_missing(
    nobody: pytest.MonkeyPatch, variable: str, endpoint: str
) -> None:
    nobody.setenv(variable, endpoint)
    with pytest.raises(StoreError, match=f"cannot be opened: .*{endpoint}") as caught:
        open_store("s3://bucket/x").get("a")
    assert f"check {variable}, which begins with http:// or https://" in (caught.value.hint or "")


def test_the_hint_names_the_variable_that_the_endpoint_is_from(nobody: pytest.MonkeyPatch) -> None:
    nobody.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        S3Store("s3://bucket/x").get("a")
    assert (caught.value.hint or "").startswith("check AWS_ENDPOINT_URL, ")


def test_an_endpoint_may_stand_in_awss_own_file(nobody: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config").write_text("[default]\nendpoint_url = http://127.0.0.1:9\n")
    nobody.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(StoreError, match="cannot be reached") as caught:
        S3Store("s3://bucket/x").get("a")
    assert "check endpoint_url in ~/.aws/config" in (caught.value.hint or "")


def test_a_store_that_was_never_reached_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with pytest.raises(StoreError, match=r"http://127.0.0.1:9: connection refused \(3 tries") as e:
        S3Store("s3://bucket/x").get("a")
    assert "AWS_ENDPOINT_URL_S3" in (e.value.hint or "")


def test_an_answer_that_never_comes_is_asked_for_again(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 0.3)
    fake.faults.append(Fault(kind=Kind.BLACKHOLE, verb="PUT", times=1))
    store = store_on(fake)
    store.put("a", b"1")
    assert store.get("a") == b"1"
    assert fake.count("PUT") >= 2  # more on a busy machine


def test_every_body_carries_its_md5(fake: FakeS3, large: Path) -> None:
    store = store_on(fake)
    store.put("a", b"whole")
    store.upload("large", large)
    bodies = [r for r in fake.requests if r.verb in ("PUT", "PUT partNumber")]
    assert len(bodies) == PARTS + 1
    for request in bodies:
        kinds = {"content-md5", "x-amz-checksum-sha256", "x-amz-checksum-crc32"}
        assert kinds & set(request.headers) == {"content-md5"}


def test_an_object_that_vanished_between_a_conflict_and_the_look_is_put_again(fake: FakeS3) -> None:
    store = store_on(fake)
    store.check_conditions()
    fake.faults.append(Fault(kind=Kind.REFUSE, verb="PUT", times=1, status=412, code="Precondit"))
    assert store.put_if_absent("a", b"ours")
    assert store.get("a") == b"ours"


def test_what_is_missing_in_a_bucket_that_is_missing_is_an_error(fake: FakeS3) -> None:
    store = S3Store("s3://nowhere/x", retry_policy=IMPATIENT)
    for ask in (
        store.get,
        store.head,
        store.get_stored,
        lambda key: store.fetch(key, Path("x"), size=1),
    ):
        with pytest.raises(StoreError, match="NoSuchBucket") as caught:
            ask("a")
        assert "s3 mb s3://nowhere" in (caught.value.hint or "")


def test_an_answer_of_a_server_that_is_no_store_is_not_missing(fake: FakeS3) -> None:
    store = store_on(fake)
    page = Fault(kind=Kind.REFUSE, verb="GET", status=404, code="")
    fake.faults += [page, Fault(kind=Kind.REFUSE, verb="HEAD", status=404, code="")]
    for ask in (store.get, store.head):
        with pytest.raises(StoreError):
            ask("a")


def test_more_keys_than_a_page_are_listed_even_if_the_store_hides_them(make_fake: MakeFake) -> None:
    for quirks in ((), (Quirk.LISTS_1000_SILENTLY,), (Quirk.LISTS_WITHOUT_TOKENS,)):
        fake = make_fake(*quirks)
        store = store_on(fake)
        keys = [f"k/{n:04}" for n in range(2500)]
        for key in keys:
            fake.objects[f"{store.prefix}{key}"] = stored(b"x")
        assert [entry.key for entry in store.list("k/")] == keys


def test_keys_out_of_order_are_an_error_and_not_an_endless_list(make_fake: MakeFake) -> None:
    store = store_on(make_fake(Quirk.LISTS_UNSORTED))
    store.put("a", b"")
    store.put("b", b"")
    with pytest.raises(StoreError, match="lists 'a' after 'b'"):
        list(store.list(""))


def test_a_store_that_promises_more_and_never_sends_it_is_an_error(make_fake: MakeFake) -> None:
    store = store_on(make_fake(Quirk.LISTS_MORE_AND_MORE))
    store.put("a", b"")
    with pytest.raises(StoreError, match="more after 'a' and does not send it"):
        list(store.list(""))


def test_what_consoles_make_for_an_empty_folder_is_no_object(fake: FakeS3) -> None:
    store = store_on(fake)
    fake.objects[f"{store.prefix}"] = stored(b"")
    fake.objects[f"{store.prefix}runs/"] = stored(b"")
    store.put("runs/a", b"")
    assert [entry.key for entry in store.list("")] == ["runs/a"]


def test_ages_are_by_the_stores_clock(fake: FakeS3) -> None:
    fake.now = lambda: time.time() - 7200  # two hours behind ours
    store = store_on(fake)
    store.put("a", b"x")
    assert store.get_stored("a").age < 60
    fake.now = lambda: time.time() - 7200 + 500
    assert 490 < store.get_stored("a").age < 560
    fake.now = lambda: time.time() - 9000  # its clock went back
    assert store.get_stored("a").age == 0


def test_a_store_that_sends_no_time_is_refused_where_time_matters(make_fake: MakeFake) -> None:
    store = store_on(make_fake(Quirk.SENDS_NO_DATE))
    store.put("a", b"x")
    assert store.get("a") == b"x"
    with pytest.raises(StoreError, match="no Date header"):
        store.get_stored("a")


def test_a_setting_that_is_none_is_reported_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NANOCHAT_S3_ADDRESSING", "odd")
    with pytest.raises(StoreError, match="odd is invalid") as caught:
        open_store("s3://bucket/x").get("a")
    assert "NANOCHAT_S3_ADDRESSING" in (caught.value.hint or "")


def stored(data: bytes) -> Object:
    """An object as the server has it."""
    return Object(data=data, etag="e", written=time.time())
