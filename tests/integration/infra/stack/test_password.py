"""A home's own server asks other users, other origins and unasked changes for its password."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.prefect.password import ensure_password, find_password, password_path
from tests.support.browser.chromium import NO_CHROMIUM, find_chromium
from tests.support.infra.stack.attempts import (
    csrf_token,
    stack_without_a_set_password,
    try_api_as_another_user,
    try_files_as_another_user,
    try_from_a_foreign_origin,
    try_without_a_token,
    try_wrong_passwords,
)
from tests.support.infra.stack.live import LiveStack


@pytest.fixture(scope="module")
def own(prefect_database: Path) -> Iterator[LiveStack]:
    """A stack whose owner has set no password."""
    with stack_without_a_set_password(prefect_database) as stack:
        yield stack


def through(outcome: dict[str, str]) -> dict[str, str]:
    """Return the attempts that got something."""
    return {name: what for name, what in outcome.items() if what}


def test_a_password_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()

    password = ensure_password(tmp_path)

    assert re.fullmatch(r"nanochat:[\w-]{32}", password)
    assert ensure_password(tmp_path) == find_password(tmp_path) == password
    assert stat.S_IMODE(password_path(tmp_path).stat().st_mode) == 0o600


def test_a_link_in_its_place_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "prefect").mkdir()
    (tmp_path / "elsewhere").write_text("nanochat:known-to-all\n")
    password_path(tmp_path).symlink_to(tmp_path / "elsewhere")

    assert find_password(tmp_path) is None
    ensure_password(tmp_path)
    assert (tmp_path / "elsewhere").read_text() == "nanochat:known-to-all\n"


@pytest.mark.prefect
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_gets_neither_the_password_nor_in(own: LiveStack) -> None:
    files = [own.home, own.home / "prefect", password_path(own.home)]

    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o700, 0o700, 0o600]
    assert through(try_files_as_another_user(own.home)) == {}
    assert through(try_api_as_another_user(str(own.record.api_url))) == {}


@pytest.mark.prefect
@pytest.mark.timeout(600)
def test_no_other_password_gets_in(own: LiveStack) -> None:
    api_url = str(own.record.api_url)
    token = csrf_token(api_url, str(find_password(own.home)))

    assert through(try_wrong_passwords(api_url, token)) == {}


@pytest.mark.prefect
@pytest.mark.timeout(600)
def test_a_change_needs_a_token_besides_the_password(own: LiveStack) -> None:
    password = str(find_password(own.home))

    assert through(try_without_a_token(str(own.record.api_url), password)) == {}


@pytest.mark.prefect
@pytest.mark.timeout(600)
def test_the_password_is_in_no_command_line_and_no_log(own: LiveStack) -> None:
    secret = str(find_password(own.home)).partition(":")[2]
    words = [" ".join(process.cmdline()) for process in own.processes()]
    logs = list((own.home / "prefect").glob("*.log"))

    assert len(words) >= 3  # supervisor, server, worker
    assert not [line for line in words if secret in line]
    assert logs
    assert not [log for log in logs if secret in log.read_text()]


@pytest.mark.prefect
@pytest.mark.timeout(600)
def test_the_printed_address_logs_in_and_a_foreign_origin_gets_nothing(own: LiveStack) -> None:
    if find_chromium() is None:
        pytest.skip(NO_CHROMIUM)

    assert through(try_from_a_foreign_origin(own)) == {}
