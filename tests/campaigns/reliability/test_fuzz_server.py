"""The chat server against thousands of hostile requests, 500 clients that leave, and overload."""

import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.campaigns import Campaign
from tests.support.nanochat_core.server.process import serving_apart
from tests.support.reliability.server_fuzz import fire_many
from tests.support.reliability.server_load import disconnect, fuzz, overload

pytestmark = pytest.mark.timeout(7200)


def test_no_request_breaks_the_server_or_sees_another(campaign: Campaign) -> None:
    campaign.found(fuzz(campaign.seeds(20_000)))


def test_slots_are_free_within_a_second_of_the_last_disconnect(campaign: Campaign) -> None:
    disconnect(campaign.seeds(500), seconds=1.0)


def test_ten_times_what_it_can_take(campaign: Campaign) -> None:
    counts, healths = overload(campaign.trials(120))
    middle, p99 = statistics.median(healths), healths[int(0.99 * len(healths))]
    campaign.found(f"{counts}, /health p50 {1e3 * middle:.1f} ms, p99 {1e3 * p99:.1f} ms")
    assert p99 < 0.1


def test_an_engine_that_answers_the_wrong_client_is_seen() -> None:
    leaky = "tests.support.nanochat_core.server.fake_engine:open_leaky"
    with serving_apart(max_waiting=16, maker=leaky) as server, ThreadPoolExecutor(8) as threads:
        _, wrong = fire_many(server.port, threads, range(800), set())
    assert any("of another request came back" in what for what in wrong)
