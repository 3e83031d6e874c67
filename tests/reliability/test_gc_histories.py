"""Garbage is collected while runs use the store: 100 histories here, 1,000 in the slow tests.

NANOCHAT_TRIALS and NANOCHAT_SEED give the slow test another number, and another first seed. Each
control takes one protection out, and histories that are all well with it are broken.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator
from typing import Any

import pytest

import flows.build.build
import flows.gc.collect
import flows.gc.reach
import flows.gc.survey
from flows.artifacts.runs import RunRecord
from flows.gc.reach import Edges, Reachable, Rules
from flows.gc.survey import Survey
from flows.identity.manifest import Manifest
from tests.reliability import gc_actors
from tests.reliability.gc_histories import RULES, simulate

_TRIALS = int(os.environ.get("NANOCHAT_TRIALS", "1000"))
_FIRST = int(os.environ.get("NANOCHAT_SEED", "1000"))
_PART = 25
_ENOUGH = 150  # histories in which a control has to show


@pytest.mark.parametrize("first", range(0, 100, _PART))
def test_what_is_in_use_stays_whole_and_the_rest_goes(first: int) -> None:
    check(range(first, first + _PART))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_what_is_in_use_stays_whole_and_the_rest_goes_in_many_histories() -> None:
    check(range(_FIRST, _FIRST + _TRIALS))


def test_a_seed_is_one_history() -> None:
    assert simulate(7, trace=True).trace == simulate(7, trace=True).trace != []


def check(seeds: range) -> None:
    histories = [simulate(seed) for seed in seeds]
    assert {h.seed: h.broken for h in histories if h.broken} == {}
    assert sum(h.deleted for h in histories) > 10 * len(histories)
    assert sum(h.reused for h in histories) > len(histories)
    assert sum(h.waited for h in histories) > len(histories)


edges_of = flows.gc.reach._edges_of  # pyright: ignore[reportPrivateUsage]


def own_files_only(manifest: Manifest) -> Edges:
    """As if a manifest could name its own attempts only."""
    edges = edges_of(manifest)
    place = f"{manifest.stage}/{manifest.fingerprint}/"
    own = frozenset(name for name in edges.attempts if name.startswith(place))
    return dataclasses.replace(edges, attempts=own)


def no_inputs(manifest: Manifest) -> Edges:
    """As if nothing were needed of what an artifact was made from."""
    return dataclasses.replace(edges_of(manifest), inputs=())


make_survey = flows.gc.survey.make_survey


def all_is_ripe(*arguments: Any, **options: Any) -> Survey:
    """As if there were neither a grace nor two passes."""
    survey = make_survey(*arguments, **options)
    return dataclasses.replace(survey, deletable=survey.garbage)


@contextlib.contextmanager
def no_pin(*arguments: Any, **options: Any) -> Generator[None]:
    """As if nothing were pinned."""
    yield


def only_record(store: Any, record: Callable[[], None], **options: Any) -> None:
    """As if nobody waited for a collection."""
    record()


AT_ONCE = Rules(keep=RULES.keep, grace=0.0)
CONTROLS: dict[str, tuple[Any, str, Any, Rules]] = {
    "runs do not wait": (flows.build.build, "reserve", only_record, RULES),
    "tags do not wait": (gc_actors, "reserve", only_record, RULES),
    "use is not recorded before": (RunRecord, "add", lambda *arguments: None, RULES),
    "foreign files are ignored": (flows.gc.reach, "_edges_of", own_files_only, RULES),
    "inputs are ignored": (flows.gc.reach, "_edges_of", no_inputs, RULES),
    "there is no grace": (flows.gc.collect, "make_survey", all_is_ripe, AT_ONCE),
    "what waits keeps nothing": (
        flows.gc.survey,
        "_reached_by_waiting",
        lambda *arguments: Reachable(),
        RULES,
    ),
    "nothing is pinned": (gc_actors, "pin", no_pin, RULES),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_without_one_of_the_protections_a_history_breaks(
    control: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, value, rules = CONTROLS[control]
    monkeypatch.setattr(owner, name, value)
    assert any(simulate(seed, rules=rules).broken for seed in range(_ENOUGH))
