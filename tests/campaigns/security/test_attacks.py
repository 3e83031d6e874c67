"""Attacks on the sandbox, records, stores, models, the servers and the page: none gets through."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.campaigns.security import http, model, page, prefect, records, sandbox, store
from tests.campaigns.security.rows import Row
from tests.support.browser.chromium import NO_CHROMIUM, find_chromium
from tests.support.campaigns import Campaign

pytestmark = pytest.mark.timeout(3600)


def check(campaign: Campaign, rows: Sequence[Row]) -> None:
    """Record the rows; fail on each attempt that got through."""
    campaign.found(
        "; ".join(
            f"{row.part}: {row.attempts:,} attempts, {len(row.got_through)} got through"
            for row in rows
        )
    )
    assert [f"{row.part}: {what}" for row in rows for what in row.got_through] == []


@pytest.mark.parametrize("wall", sandbox.WALLS)
@pytest.mark.parametrize("user", [0, sandbox.ORDINARY_USER])
def test_programs(campaign: Campaign, wall: str, user: int) -> None:
    if os.geteuid() != 0 and user != 0:
        pytest.skip("only root becomes another user")
    with tempfile.TemporaryDirectory(prefix="sandbox-") as copy:
        row = sandbox.run_copy(Path(copy), wall, user)
    if row is None:
        pytest.skip(f"there is no {wall} here")
    check(campaign, [row])


def test_malformed_records(campaign: Campaign) -> None:
    check(campaign, records.run(campaign.seed))


def test_hostile_stores(campaign: Campaign) -> None:
    check(campaign, store.run())


@pytest.mark.torch
def test_mutated_model_directories(campaign: Campaign) -> None:
    check(campaign, model.run(campaign.seed))


def test_requests(campaign: Campaign) -> None:
    check(campaign, http.run(campaign.seed, count=campaign.trials(10_000)))


@pytest.mark.skipif(find_chromium() is None, reason=NO_CHROMIUM)
def test_texts_on_the_page(campaign: Campaign) -> None:
    check(campaign, page.run())


@pytest.mark.prefect
def test_strangers_at_a_stack(campaign: Campaign) -> None:
    check(campaign, prefect.run())
