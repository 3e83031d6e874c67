"""A run over a network that breaks: the same artifacts in the end, or one clear error.

Each trial is a run of a small pipeline (fault_pipeline.py) in which one request to the store is
broken in one of seventeen ways, or each with some probability. Whatever happens:

- it ends with the digests of an undisturbed run, or with one line that says what is wrong and a
  hint; never with others, never with a traceback;
- no reader ever sees an artifact that is not whole;
- the store is not stormed: at most eight times the requests of an undisturbed run;
- the same run without faults, given again, ends well.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.infra.storage.misbehaviour import CALM, NETWORK_FAULTS, Fault, Kind, Storm
from tests.support.reliability.fault_pipeline import Outcome, Pipeline

# Verbs of the requests that a kind can break: others have no body, or are no write.
_VERBS = {
    Kind.FLIP: "(GET|POST).*",
    Kind.SHORTEN: "(GET|POST).*",
    Kind.CUT: "(GET|POST).*",
    Kind.STALE: "(GET|HEAD).*",
    Kind.FLIP_REQUEST: "(PUT|POST).*",
    Kind.REPLAY: "(PUT|POST).*",
}
_STORMS = 7  # one of so many trials is a storm
_RATES = (0.02, 0.3)  # of requests that a storm breaks


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is done to a run."""

    fault: Fault | None  # None: a storm
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


def bad(results: Sequence[tuple[Trial, Outcome]]) -> list[tuple[Trial, Outcome]]:
    """Trials in which a promise was broken."""
    assert any(outcome.fired for _, outcome in results)
    return [(trial, outcome) for trial, outcome in results if not outcome.is_good]


def plan(pipeline: Pipeline, *, trials: int, seed: int) -> list[Trial]:
    """As many trials, of all kinds alike, each request alike; some storms, some of a new store."""
    chance = random.Random(seed)
    numbers: dict[tuple[Kind, bool], list[int]] = {}
    planned: list[Trial] = []
    for number in range(trials):
        is_storm = number % _STORMS == _STORMS - 1
        tries_conditions = chance.random() < 0.1
        kind = NETWORK_FAULTS[(number - number // _STORMS) % len(NETWORK_FAULTS)]
        fault = None
        if not is_storm:
            verb = _VERBS.get(kind, ".*")
            left = numbers.setdefault((kind, tries_conditions), [])
            if not left:  # every request has had its turn
                calm = pipeline.calm[tries_conditions]
                left.extend(range(sum(n for v, n in calm.items() if re.fullmatch(verb, v))))
                chance.shuffle(left)
            fault = Fault(kind=kind, skip=left.pop(), times=1, verb=verb)
        planned.append(
            Trial(
                fault=fault,
                storm=Storm(rate=chance.uniform(*_RATES)) if is_storm else CALM,
                seed=chance.randrange(1 << 32),
                watched=chance.random() < 0.25,
                tries_conditions=tries_conditions,
            )
        )
    return planned


def try_faults(pipeline: Pipeline, *, trials: int, seed: int) -> list[tuple[Trial, Outcome]]:
    """Do all trials."""
    return [(trial, trial.do(pipeline)) for trial in plan(pipeline, trials=trials, seed=seed)]


def summary(results: Sequence[tuple[Trial, Outcome]]) -> str:
    """Return what became of the faults, in a line."""
    outcomes = [outcome for _, outcome in results]
    ended = Counter(outcome.ended for outcome in outcomes)
    return (
        f"{sum(len(outcome.fired) for outcome in outcomes):,} faults in {len(outcomes):,} runs: "
        f"{ended.pop('same', 0)} with the same digests, "
        f"{ended.pop('error', 0)} with one clear error, "
        f"{sum(ended.values())} with another end; "
        f"{sum(o.again is None for o in outcomes):,} reruns completed, "
        f"at most {max(o.ratio for o in outcomes):.1f} times the requests; "
        f"{len(bad(results))} broke a promise"
    )
