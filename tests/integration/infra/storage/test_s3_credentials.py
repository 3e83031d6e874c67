"""A refusal is one line, by a server that checks credentials; no error has a secret in it."""

from pathlib import Path

import pytest

from infra.storage.s3.store import S3Store
from nanochat_core.errors import StoreError
from tests.conftest import BUCKET
from tests.support.infra.storage.fixtures import IMPATIENT
from tests.support.infra.storage.s3_server import S3Server
from tests.support.infra.storage.verbs import VERBS

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


@pytest.mark.parametrize(
    ("others", "error", "hint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "geheim"}, "SignatureDoesNotMatch",
         "wrong secret for this access key"),
        ({"AWS_ACCESS_KEY_ID": "AKIAUNKNOWN"}, "InvalidAccessKeyId", ""),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "NoCredentialsError",
         "AWS_PROFILE"),
        ({"AWS_PROFILE": "unknown"}, "unknown", ""),
        ({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}, "cannot be reached", ""),
    ],
)  # fmt: skip
def test_credentials_that_are_wrong_are_reported_and_no_error_has_a_secret(
    user: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    others: dict[str, str],
    error: str,
    hint: str,
) -> None:
    store, secret = use(monkeypatch, user, **others), (user | others)["AWS_SECRET_ACCESS_KEY"]
    for name in [name for name, value in others.items() if not value]:
        monkeypatch.delenv(name)
    for verb in ("get", "head", "put"):
        with pytest.raises(StoreError, match=error) as caught:
            VERBS[verb](store, "a", Path("source"))
        assert hint in (caught.value.hint or "")
        chain: BaseException | None = caught.value
        while chain and secret:
            assert secret not in f"{chain!r} {chain} {getattr(chain, 'hint', '')} {vars(store)}"
            chain = chain.__cause__ or chain.__context__
    assert not secret or secret not in caplog.text


@pytest.mark.parametrize(
    ("verb", "allow"),
    [
        ("put", "GetObject ListBucket"),
        ("get", "PutObject ListBucket"),
        ("head", "PutObject ListBucket"),
        ("list", "PutObject GetObject"),
        ("delete", "PutObject ListBucket"),
    ],
)
def test_what_a_user_may_not_is_reported_and_never_taken_for_missing(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str, allow: str
) -> None:
    use(monkeypatch, s3_server.environment).put("there", b"x")
    actions = tuple(f"s3:{action}" for action in allow.split())
    store = use(monkeypatch, s3_server.add_user(f"user-{verb}", allow=actions))
    with pytest.raises(StoreError, match="AccessDenied") as caught:
        VERBS[verb](store, "there", tmp_path / "source")
    assert "s3:GetObject" in (caught.value.hint or "")
