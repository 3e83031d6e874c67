"""Secrets stay in the environment: no database, log, artifact, file or command line has one.

A deployed flow runs with canaries for keys and passwords, and everything it leaves is searched.
"""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.prefect.server import password_path
from infra.storage.open import open_store
from tests.campaigns.end_to_end.small import SECONDS, start_flow
from tests.conftest import BUCKET
from tests.support.flows.waiting import wait_until
from tests.support.infra.stack.live import LiveStack
from tests.support.infra.stack.postgres import Postgres, find_binaries, running_postgres
from tests.support.infra.storage.s3_server import S3Server
from tests.support.reliability.canaries import (
    find_in_file,
    find_in_files,
    find_in_text,
    reading_command_lines,
)

USER = "trials"


@pytest.fixture
def canaries(s3_server: S3Server) -> dict[str, str]:
    """Return the secrets that must not be found, by what they are."""
    keys = s3_server.add_user("secrets")
    return {
        "secret key": keys["AWS_SECRET_ACCESS_KEY"],
        "access key": keys["AWS_ACCESS_KEY_ID"],
        "password of Prefect": f"canary-{secrets.token_hex(12)}",
        "password of the database": f"canary-{secrets.token_hex(12)}",
        "address of the webhook": f"canary-{secrets.token_hex(12)}",
    }


@pytest.fixture
def database(canaries: dict[str, str]) -> Iterator[Postgres | None]:
    """Postgres where there is one; else Prefect's history is a file in the home."""
    if find_binaries() is None:
        yield None
        return
    with running_postgres(canaries["password of the database"]) as postgres:
        yield postgres


@pytest.fixture
def stack(
    tmp_path: Path, s3_server: S3Server, canaries: dict[str, str], database: Postgres | None
) -> Iterator[LiveStack]:
    environment = {
        **s3_server.environment,
        "AWS_ACCESS_KEY_ID": canaries["access key"],
        "AWS_SECRET_ACCESS_KEY": canaries["secret key"],
        # No server listens there: the failure is reported, and must not have the address.
        "NANOCHAT_WEBHOOK": f"http://127.0.0.1:9/{canaries['address of the webhook']}",
        "NANOCHAT_STORE": f"s3://{BUCKET}/secrets",
    }
    if database is not None:
        environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database.prefect_url
    password = password_path(tmp_path / "place" / "home")
    password.parent.mkdir(parents=True)
    password.touch(mode=0o600)
    password.write_text(f"{USER}:{canaries['password of Prefect']}\n")
    stack = LiveStack(
        tmp_path / "place" / "home",
        port=4730,
        environment=environment,
    )
    yield stack
    stack.end()


@pytest.mark.prefect
@pytest.mark.torch
@pytest.mark.timeout(3600)
def test_a_deployed_flow_leaves_no_secret_anywhere(
    stack: LiveStack,
    canaries: dict[str, str],
    database: Postgres | None,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reading_command_lines(canaries) as (lines, moments):
        stack.start()
        assert stack.api.get("health") is True
        run = start_flow(stack, "main")
        assert stack.api.wait_for_end(run, seconds=SECONDS)["state_type"] == "COMPLETED"
        wrong = start_flow(stack, "main", pretrain__steps=1)
        assert stack.api.wait_for_end(wrong, seconds=120)["state_type"] == "FAILED"
        # Prefect's worker removes the environment of a run when the run's process has ended.
        wait_until(lambda: not [*stack.home.glob("prefect/*/*/workspace.json")], seconds=120)
        logs = json.dumps(stack.api.logs(run) + stack.api.logs(wrong)).encode()
        stack.down()
    assert len(moments) > 100
    assert lines == set()
    assert logs.count(b"message") > 10
    assert find_in_text(logs, canaries) == []
    password_path(stack.home).unlink()  # the one place of the server's password
    assert list(find_in_files(stack.home.parent, canaries)) == []
    if database is not None:
        (tmp_path / "dump.sql").write_bytes(database.dump())
        assert (tmp_path / "dump.sql").stat().st_size > 100_000
        assert find_in_file(tmp_path / "dump.sql", canaries) == []
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{BUCKET}/secrets")
    objects = list(store.list(""))
    assert len(objects) > 50
    for each in objects:
        assert find_in_text(store.get(each.key, size=each.size), canaries) == [], each.key
