"""A run over a network that breaks: the same artifacts in the end, or one clear error.

Each trial is a run of a small pipeline (fault_pipeline.py) in which one request to the store is
broken in one of seventeen ways (fault_kinds.py), or each with some probability. Whatever happens:

- it ends with the digests of an undisturbed run, or with one line that says what is wrong and a
  hint; never with others, never with a traceback;
- no reader ever sees an artifact that is not whole;
- the store is not stormed: at most eight times the requests of an undisturbed run;
- the same run without faults, given again, ends well.

`make test` tries a few of each kind, `make slow` every request with every kind and some storms, or
NANOCHAT_TRIALS of them. By hand, with a table:

    .venv/bin/python -m tests.reliability.test_faults --trials 200 --seed 1 --report faults.json
"""

import argparse
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flows.identity.manifest import File
from infra.storage.base import OnBytes, ignore_bytes
from infra.storage.s3.errors import RetryPolicy
from tests.infra.storage.s3_server import S3Server, start_s3
from tests.reliability.fault_kinds import KINDS
from tests.reliability.fault_pipeline import (
    MOST_REQUESTS,
    Outcome,
    Pipeline,
    TriedStore,
    open_pipeline,
)
from tests.reliability.fault_proxy import CALM, Fault, Storm

TRIALS = int(os.environ.get("NANOCHAT_TRIALS", "2000"))
FEW = 21  # each kind once, and three storms
# Requests that a kind can break: others have no body, or are no write.
_METHODS = {
    "corrupt": "GET|POST",
    "shorten": "GET|POST",
    "truncate": "GET|POST",
    "stale": "GET|HEAD",
    "corrupt_request": "PUT|POST",
    "replay_later": "PUT|POST",
}
_STORMS = 7  # one of so many trials is a storm
_RATES = (0.02, 0.3)  # of requests that a storm breaks


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is done to a run."""

    kind: str  # of the fault, or "storm"
    fault: Fault | None
    storm: Storm = CALM
    seed: int
    watched: bool
    tries_conditions: bool

    def do(self, pipeline: Pipeline) -> Outcome:
        """Do it."""
        return pipeline.run(
            *([self.fault] if self.fault else []),
            storm=self.storm,
            seed=self.seed,
            watched=self.watched,
            tries_conditions=self.tries_conditions,
        )


@pytest.fixture(scope="module")
def pipeline(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with open_pipeline(tmp_path_factory.mktemp("pipeline"), s3_server) as opened:
        yield opened


def test_a_broken_request_costs_a_retry_or_one_clear_error(pipeline: Pipeline) -> None:
    assert bad(campaign(pipeline, trials=FEW, seed=1)) == []


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_every_request_may_break_in_every_way(pipeline: Pipeline) -> None:
    assert bad(campaign(pipeline, trials=TRIALS, seed=2)) == []


@pytest.mark.parametrize("kind", ["status", "reset_before", "drop_response", "error200"])
def test_a_store_that_breaks_for_good_is_one_clear_error(pipeline: Pipeline, kind: str) -> None:
    outcome = pipeline.run(Fault(kind=kind, nth=30, count=10**6))
    assert (outcome.ended, outcome.is_good) == ("error", True), outcome
    assert "was stopped while it waited for" in outcome.said


@pytest.mark.parametrize(
    "fault",
    [
        # An error document with status 200 has no Last-Modified.
        Fault(kind="error200", method="GET", target="lease.json", nth=2),
        Fault(kind="error200", method="HEAD", target="/files/", nth=2),
        # A large object has just been put together, and is not to be seen.
        Fault(kind="stale", method="HEAD", target="b.bin", nth=2),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.method}",
)
def test_an_answer_that_cannot_be_is_asked_for_again(pipeline: Pipeline, fault: Fault) -> None:
    outcome = pipeline.run(fault)
    assert (outcome.ended, len(outcome.fired)) == ("same", 1), outcome


def test_without_hashing_damage_goes_into_the_results(pipeline: Pipeline) -> None:
    """The damage is real, and nothing else would notice it."""
    fault = Fault(kind="corrupt", method="GET", target="/files/.*value")
    assert pipeline.run(fault).ended == "same"
    with mock.patch("flows.artifacts.transfer.find_fault", _find_absence):
        assert pipeline.run(fault).ended == "different"


def _find_absence(file: File, path: Path) -> str | None:
    return None if path.exists() else "is gone"


def test_without_a_limit_to_retries_the_store_is_stormed(pipeline: Pipeline) -> None:
    fault = Fault(kind="status", nth=30, count=10**6)
    many = int(1.1 * MOST_REQUESTS * sum(pipeline.calm[False].values()))
    outcome = pipeline.run(fault, patience=RetryPolicy(tries=many, first_wait=0.0, deadline=600.0))
    assert (outcome.ended, outcome.is_good) == ("error", False)
    assert outcome.ratio > MOST_REQUESTS


class ManifestFirst(TriedStore):
    """Says that files are stored when they are not yet: until a moment after the manifest."""

    def upload(self, key: str, path: Path, *, on_bytes: OnBytes = ignore_bytes) -> None:
        """See Store."""
        # Several threads upload: each adds to one dictionary.
        self.__dict__.setdefault("late", {})[key] = path.read_bytes()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See Store."""
        is_ours = super().put_if_absent(key, data)
        if key.endswith("/manifest.json"):
            time.sleep(0.1)
            for late, content in self.late.items():
                self.put(late, content)
            self.late = {}
        return is_ours


def test_a_reader_sees_manifests_that_come_before_their_files(pipeline: Pipeline) -> None:
    outcome = pipeline.run(watched=True, kind=ManifestFirst)
    assert outcome.ended == "same"
    assert outcome.partial


def bad(results: Sequence[tuple[Trial, Outcome]]) -> list[tuple[Trial, Outcome]]:
    """Trials in which a promise was broken."""
    assert any(outcome.fired for _, outcome in results)
    return [(trial, outcome) for trial, outcome in results if not outcome.is_good]


def plan(pipeline: Pipeline, *, trials: int, seed: int) -> list[Trial]:
    """As many trials, of all kinds alike, each request alike; some storms, some of a new store."""
    chance = random.Random(seed)
    numbers: dict[tuple[str, bool], list[int]] = {}
    planned: list[Trial] = []
    for number in range(trials):
        is_storm = number % _STORMS == _STORMS - 1
        tries_conditions = chance.random() < 0.1
        kind = "storm" if is_storm else list(KINDS)[(number - number // _STORMS) % len(KINDS)]
        method = _METHODS.get(kind, ".*")
        left = numbers.setdefault((kind, tries_conditions), [])
        if not left:  # every request has had its turn
            calm = pipeline.calm[tries_conditions]
            left.extend(range(1, sum(n for m, n in calm.items() if re.fullmatch(method, m)) + 1))
            chance.shuffle(left)
        planned.append(
            Trial(
                kind=kind,
                fault=None if is_storm else Fault(kind=kind, nth=left.pop(), method=method),
                storm=Storm(rate=chance.uniform(*_RATES)) if is_storm else CALM,
                seed=chance.randrange(1 << 32),
                watched=chance.random() < 0.25,
                tries_conditions=tries_conditions,
            )
        )
    return planned


def campaign(
    pipeline: Pipeline,
    *,
    trials: int,
    seed: int,
    tell: Callable[[str], object] = lambda text: None,
) -> list[tuple[Trial, Outcome]]:
    """Do all trials."""
    results: list[tuple[Trial, Outcome]] = []
    for number, trial in enumerate(plan(pipeline, trials=trials, seed=seed), 1):
        results.append((trial, trial.do(pipeline)))
        if number % 100 == 0:
            tell(f"{number} trials, {len(bad(results))} bad")
    return results


def table(results: Sequence[tuple[Trial, Outcome]]) -> dict[str, dict[str, Any]]:
    """What became of the faults, by kind."""
    rows: dict[str, dict[str, Any]] = {}
    for kind in sorted({trial.kind for trial, _ in results}):
        those = [outcome for trial, outcome in results if trial.kind == kind]
        rows[kind] = {
            "runs": len(those),
            "fired": sum(len(outcome.fired) for outcome in those),
            "same": sum(outcome.ended == "same" for outcome in those),
            "clear error": sum(outcome.ended == "error" for outcome in those),
            "other": sum(outcome.ended not in ("same", "error") for outcome in those),
            "partial": sum(bool(outcome.partial) for outcome in those),
            "rerun ok": sum(outcome.again is None for outcome in those),
            "worst requests": round(max(outcome.ratio for outcome in those), 2),
            "worst seconds": round(max(outcome.seconds for outcome in those), 1),
        }
    return rows


def main() -> None:
    """The campaign by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start_s3(Path(folder) / "s3")
        try:
            with open_pipeline(Path(folder) / "pipeline", server) as opened:
                results = campaign(opened, trials=given.trials, seed=given.seed, tell=_say)
        finally:
            server.stop()
    rows = table(results)
    names = list(next(iter(rows.values())))
    _say(f"| kind | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for kind, row in rows.items():
        _say(f"| {kind} | {' | '.join(str(row[name]) for name in names)} |")
    broken = [{"trial": asdict(t), "outcome": asdict(o)} for t, o in bad(results)]
    fired = sum(len(outcome.fired) for _, outcome in results)
    _say(f"{len(broken)} of {len(results)} trials, {fired} faults, broke a promise")
    for one in broken[:20]:
        _say(json.dumps(one))
    if given.report:
        errors = [{"kind": t.kind, "said": o.said} for t, o in results if o.ended == "error"]
        whole = {"table": rows, "bad": broken, "errors": errors}
        given.report.write_text(json.dumps(whole, indent=1))


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
