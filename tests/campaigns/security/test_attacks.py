"""Attacks on the sandbox, records, stores and models: none gets through.

Those on a server of Prefect and the chat server's refusals are small enough for `make test`:
tests/integration/infra/stack/test_up.py and tests/integration/nanochat_core/server/test_guard.py.
Those on the page: test_page.py.
"""

import os
import re
import tempfile
import time
from pathlib import Path

import pytest

from tests.campaigns.security import model, records, sandbox
from tests.support.campaigns import Campaign
from tests.support.infra.storage.fake_s3 import FakeS3
from tests.support.infra.storage.misbehaviour import PAGE, Answer
from tests.support.infra.storage.s3_server import client_environment

pytestmark = pytest.mark.timeout(3600)


def check(campaign: Campaign, attempts: int, through: list[str]) -> None:
    """Record how many attempts there were; fail on each that got through."""
    campaign.found(f"{attempts:,} attempts, {len(through)} got through")
    assert through == []


@pytest.mark.parametrize("wall", sandbox.WALLS)
@pytest.mark.parametrize("user", [0, sandbox.ORDINARY_USER])
def test_programs(campaign: Campaign, wall: str, user: int) -> None:
    if os.geteuid() != 0 and user != 0:
        pytest.skip("only root becomes another user")
    with tempfile.TemporaryDirectory(prefix="sandbox-") as copy:
        found = sandbox.run_copy(Path(copy), wall, user)
    if found is None:
        pytest.skip(f"there is no {wall} here")
    check(campaign, *found)


def test_malformed_records(campaign: Campaign, tmp_path: Path) -> None:
    check(campaign, *records.run(tmp_path, campaign.seed, rounds=campaign.trials(2)))


@pytest.mark.parametrize("status", [200, 403, 404])
def test_a_web_page_in_the_place_of_a_bucket_is_never_an_empty_store(
    tmp_path: Path, status: int
) -> None:
    fake = FakeS3()
    fake.answer = lambda request: Answer(status=status, body=PAGE * (request.method != "HEAD"))
    variables = client_environment(fake.endpoint) | {"NANOCHAT_STORE": "s3://fake/store"}
    with records.environment(tmp_path / "home", **variables):
        for command in records.COMMANDS:
            code, _, err = found = records.ask(command)
            assert (code, "error: store s3://fake/store" in err) == (1, True), found
            assert records.fault_of(command, found, found, record="", is_none=False) is None
    fake.stop()


@pytest.mark.torch
def test_mutated_model_directories(campaign: Campaign, tmp_path: Path) -> None:
    attempts = campaign.trials(10_000)
    check(campaign, attempts, model.try_all(tmp_path, attempts=attempts, seed=campaign.seed))


@pytest.mark.torch
def test_a_crash_a_traceback_a_hang_and_a_wrong_answer_are_seen(tmp_path: Path) -> None:
    """The control of mutated models."""
    trials = (os.abort, lambda: time.sleep(60), lambda: [][0], lambda: None)

    def trial(directory: Path, rng: object) -> None:
        n = len(list(tmp_path.glob("seen-*")))
        (tmp_path / f"seen-{n}").touch()
        trials[n]()

    found = model.try_all(tmp_path, attempts=4, seed=1, trial=trial, seconds=5.0)
    assert [re.sub(".*: ", "", line) for line in found] == [
        "ended the process by SIGABRT",
        "ended the process by SIGALRM",
        "list index out of range",
    ]
