"""A run over a network that breaks: a few faults of each kind. tests/campaigns has thousands."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from flows.identity.manifest import File
from infra.retry import RetryPolicy
from tests.support.infra.storage.misbehaviour import Fault, Kind
from tests.support.reliability import fault_pipeline
from tests.support.reliability.fault_pipeline import (
    Pipeline,
    open_pipeline,
    try_faults,
)

FEW = 19  # each kind once, and two storms


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with open_pipeline(tmp_path_factory.mktemp("pipeline")) as opened:
        yield opened


@pytest.mark.timeout(900)
def test_a_broken_request_costs_a_retry_or_one_clear_error(pipeline: Pipeline) -> None:
    outcomes = try_faults(pipeline, trials=FEW, seed=1)
    assert [outcome for outcome in outcomes if not outcome.is_good] == []


@pytest.mark.parametrize("kind", [Kind.STATUS, Kind.LOSE])
def test_a_store_that_breaks_for_good_is_one_clear_error(pipeline: Pipeline, kind: Kind) -> None:
    with mock.patch.object(fault_pipeline, "PATIENCE_OF_A_PERSON", 0.2):
        outcome = pipeline.run(Fault(kind=kind, skip=29))
    assert (outcome.ended, outcome.is_good) == ("error", True), outcome
    assert "was stopped while it waited for" in outcome.said


@pytest.mark.parametrize(
    "fault",
    [
        # An error document with status 200 has no Last-Modified.
        Fault(kind=Kind.ERROR_200, verb="GET", key="lease.json", skip=1, times=1),
        Fault(kind=Kind.ERROR_200, verb="HEAD", key="/files/", skip=1, times=1),
        # A large object has just been put together, and is not to be seen.
        Fault(kind=Kind.STALE, verb="HEAD", key="b.bin", skip=1, times=1),
    ],
    ids=lambda fault: f"{fault.kind.name}-{fault.verb}",
)
def test_an_answer_that_cannot_be_is_asked_for_again(pipeline: Pipeline, fault: Fault) -> None:
    outcome = pipeline.run(fault)
    assert (outcome.ended, len(outcome.fired)) == ("same", 1), outcome


def test_without_hashing_damage_goes_into_the_results(pipeline: Pipeline) -> None:
    """The damage is real, and nothing else would notice it."""

    def damage() -> Fault:
        return Fault(kind=Kind.FLIP, verb="GET", key="/files/.*value", times=1)

    assert pipeline.run(damage()).ended == "same"
    with mock.patch("flows.artifacts.transfer.find_fault", _find_absence):
        assert pipeline.run(damage()).ended == "different"


def _find_absence(file: File, path: Path) -> str | None:
    return None if path.exists() else "is gone"


def test_without_a_limit_to_retries_the_store_is_stormed(pipeline: Pipeline) -> None:
    most = 1.2  # times the requests, not MAX_REQUESTS: enough to see that they are counted
    fault = Fault(kind=Kind.STATUS, skip=29)
    many = int(1.1 * most * sum(pipeline.calm.values()))
    retry_policy = RetryPolicy(tries=many, first_wait=0.0)
    with (
        mock.patch.object(fault_pipeline, "MAX_REQUESTS", most),
        mock.patch.object(fault_pipeline, "PATIENCE_OF_A_PERSON", 0.2),
    ):
        outcome = pipeline.run(fault, retry_policy=retry_policy)
        assert (outcome.ended, outcome.is_good) == ("error", False)
    assert outcome.ratio > most
