"""Who may not is told so, in one line, by a server that really checks; secrets are never told."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.conftest import BUCKET
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.fixtures import IMPATIENT, store_on
from tests.support.infra.storage.misbehaviour import Fault, Kind
from tests.support.infra.storage.s3_server import S3Server

URL = f"s3://{BUCKET}/credentials"


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **others: str) -> S3Store:
    """The store as seen with these variables."""
    for name, value in (environment | others).items():
        monkeypatch.setenv(name, value)
    return S3Store(URL, retry_policy=IMPATIENT)


@pytest.fixture(scope="module")
def user(s3_server: S3Server) -> dict[str, str]:
    """The environment of a user who may do everything, and whose signatures are checked."""
    return s3_server.add_user("everything")


def test_signed_requests_of_every_kind_are_accepted(
    user: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = use(monkeypatch, user)
    (tmp_path / "f").write_bytes(bytes(17 << 20))
    store.upload("signed/large", tmp_path / "f")
    store.fetch("signed/large", tmp_path / "g", size=17 << 20)
    assert store.put_if_absent("signed/a", b"1")
    assert store.put_if_same("signed/a", b"2", version=store.get_stored("signed/a").version)
    assert store.get("signed/a") == b"2"
    assert len(list(store.list("signed/"))) == 2
    assert store.abort_stale_uploads(older_than=60) == 0
    for entry in store.list("signed/"):
        store.delete(entry.key)


@pytest.mark.parametrize("ask", ["get", "head", "put"])
def test_a_wrong_secret_is_reported(
    user: dict[str, str], monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    store = use(monkeypatch, user, AWS_SECRET_ACCESS_KEY="geheim")
    with pytest.raises(StoreError, match="SignatureDoesNotMatch") as caught:
        store.put("a", b"x") if ask == "put" else getattr(store, ask)("a")
    assert "the secret does not fit the access key" in (caught.value.hint or "")


def test_an_unknown_access_key_is_reported(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = use(monkeypatch, s3_server.environment, AWS_ACCESS_KEY_ID="AKIAUNKNOWN")
    with pytest.raises(StoreError, match="InvalidAccessKeyId"):
        store.get("a")


def test_no_credentials_are_reported(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = use(monkeypatch, s3_server.environment)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="NoCredentialsError") as caught:
        store.get("a")
    assert "AWS_PROFILE" in (caught.value.hint or "")


def test_a_profile_that_is_none_is_reported(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match="nobody"):
        use(monkeypatch, s3_server.environment).get("a")


@pytest.mark.parametrize(
    ("allow", "ask"),
    [
        (("s3:GetObject", "s3:ListBucket"), lambda store: store.put("a", b"x")),
        (("s3:PutObject", "s3:ListBucket"), lambda store: store.get("there")),
        (("s3:PutObject", "s3:ListBucket"), lambda store: store.head("there")),
        (("s3:PutObject", "s3:GetObject"), lambda store: list(store.list(""))),
        (("s3:PutObject", "s3:ListBucket"), lambda store: store.delete("there")),
    ],
    ids=["put", "get", "head", "list", "delete"],
)
def test_what_a_user_may_not_is_reported_and_never_taken_for_missing(
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    allow: tuple[str, ...],
    ask: Callable[[S3Store], object],
) -> None:
    use(monkeypatch, s3_server.environment).put("there", b"x")
    name = f"user-{request.node.callspec.id}"
    store = use(monkeypatch, s3_server.add_user(name, allow=allow))
    with pytest.raises(StoreError, match="AccessDenied") as caught:
        ask(store)
    assert "s3:GetObject" in (caught.value.hint or "")


def test_a_body_damaged_on_its_way_to_a_store_that_checks_signatures_is_sent_again(
    fake: FakeS3,
) -> None:
    store = store_on(fake)
    store.put("a", b"x")
    fake.faults.append(
        Fault(kind=Kind.REFUSE, verb="PUT", status=403, code="SignatureDoesNotMatch", times=1)
    )
    store.put("a", b"y")
    assert store.get("a") == b"y"


def test_a_part_damaged_on_its_way_is_sent_again(fake: FakeS3, large: Path) -> None:
    store = store_on(fake)
    store.put("a", b"x")
    fake.faults.append(
        Fault(kind=Kind.REFUSE, verb="PUT", status=403, code="SignatureDoesNotMatch", times=1)
    )
    store.upload("b", large)
    assert store.head("b").size == large.stat().st_size


def test_a_wrong_secret_is_not_tried_eight_times(fake: FakeS3) -> None:
    fake.faults.append(Fault(kind=Kind.REFUSE, verb=".*", status=403, code="SignatureDoesNotMatch"))
    with pytest.raises(StoreError, match="SignatureDoesNotMatch"):
        store_on(fake).get("a")
    assert len(fake.requests) == 1


def test_no_error_contains_a_secret(
    user: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = user["AWS_SECRET_ACCESS_KEY"]
    for others in (
        {"AWS_ACCESS_KEY_ID": "AKIANOBODY"},
        {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"},
    ):
        store = use(monkeypatch, user, **others)
        with pytest.raises(StoreError) as caught:
            store.put("a", b"x")
        error: BaseException | None = caught.value
        while error:
            assert secret not in f"{error!r} {error} {getattr(error, 'hint', '')}"
            error = error.__cause__ or error.__context__
        assert secret not in f"{store!r} {vars(store)}"
    assert secret not in caplog.text
