"""Comparison of several runs, or several artifacts of a stage: scores, differences, intervals.

Differences are from the first. If both scores have an interval, the difference has one too: of
paired answers if both answered the same questions, else as if the two were independent. For pairs
the interval is Newcombe's (1998, method 10), which also holds for few changed answers, and
significance is McNemar's exact test. Both cover the choice of questions, not the seed of training.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.artifacts.transfer import read_file
from flows.compare.tables import EXAMPLES, eval_rows, write_file
from flows.identity.manifest import Manifest
from flows.render.score import Score
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError
from nanochat_core.evaluate.intervals import wilson_interval

_ASKED = ("prompt", "expected", "gold")  # columns that identify a question
_LEVEL = 0.05  # significance level of McNemar's test
_SHOWN_DIGITS = 12  # of a suite's digest, in messages
_PAIRS = """
SELECT a.task, a.place, a.answer::VARCHAR, b.answer::VARCHAR, a.correct, b.correct, {same}
FROM read_parquet(?) a JOIN read_parquet(?) b USING (task, place) ORDER BY a.task, a.place
"""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The difference of a score from the first one's, with its 95 % interval."""

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None  # of McNemar's exact test; None: not of pairs

    @property
    def is_clear(self) -> bool:
        """True if the difference is significant at 5 %.

        For pairs by the exact test, else if the interval leaves out 0.
        """
        # The paired interval is an approximation, so it may disagree with the test near 5 %.
        if self.p is not None:
            return self.p < _LEVEL
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def text(self) -> str:
        """The difference with its sign and interval; * marks a clear one."""
        shown = Score(value=self.value, low=self.low, high=self.high).text(sign="+")
        return f"{shown} *" if self.is_clear else shown


@dataclass(frozen=True)
class AnswerPair:
    """Two artifacts' answers to one question."""

    task: str
    place: int  # index among the task's questions
    old: str
    new: str
    was_right: bool
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Paired answers to the questions of a task, of the first artifact and another one."""

    task: str
    total: int
    kept: int  # right in both
    gained: int  # wrong in the first, right in the other
    lost: int  # right in the first, wrong in the other
    changed: tuple[AnswerPair, ...]  # every question whose answer or correctness differs

    @property
    def delta(self) -> Delta:
        """The difference of the shares of right answers."""
        low, high = paired_interval(self.total, self.kept, self.gained, self.lost)
        value = (self.gained - self.lost) / self.total
        return Delta(value=value, low=low, high=high, p=mcnemar(self.gained, self.lost))


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The answers of one artifact paired with those of the first."""

    by_task: Mapping[str, Answers]
    why_not: str | None = None  # why some or all questions are not paired


def paired_interval(total: int, kept: int, gained: int, lost: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two shares of the same `total` questions.

    The difference is later minus earlier. The Wilson intervals of both shares are combined with
    their correlation (Newcombe 1998, Statistics in Medicine 17:2635, method 10).
    """
    neither = total - kept - gained - lost
    old, new = kept + lost, kept + gained
    (old_low, old_high), (new_low, new_high) = (wilson_interval(n, total) for n in (old, new))
    scale = math.sqrt(old * (total - old) * new * (total - new))
    both = kept * neither - gained * lost
    both = max(both - total / 2, 0) if both > 0 else both  # Newcombe's continuity correction
    correlation = both / scale if scale else 0.0
    old_share, new_share = old / total, new / total
    # The lower end is reached where the new share is low and the old one high, and vice versa.
    below = _combine(new_share - new_low, old_high - old_share, correlation)
    above = _combine(new_high - new_share, old_share - old_low, correlation)
    value = (gained - lost) / total
    return value - below, value + above


def mcnemar(gained: int, lost: int) -> float:
    """Return the p-value of McNemar's exact test; 1 if nothing changed.

    It is the probability of a change at least as uneven if gain and loss are equally likely: both
    tails of a binomial distribution.
    """
    changed = gained + lost
    # In whole numbers, since 2**changed exceeds floats. `ways`: of choosing `few` among `changed`.
    tail, ways = 0, 1
    for few in range(min(gained, lost) + 1):
        tail += ways
        ways = ways * (changed - few) // (few + 1)
    return min(1.0, 2 * tail / 2**changed)


def scores_of(manifest: Manifest) -> dict[str, Score]:
    """Return every metric of an artifact, by name."""
    return {
        row["metric"]: Score(value=row["value"], low=row["low"], high=row["high"])
        for row in eval_rows(manifest)
    }


def delta_of(old: Score, new: Score, pairs: Answers | None) -> Delta:
    """Return the difference of two scores; `pairs` are the questions that they are shares of."""
    value = new.value - old.value
    paired = pairs.delta if pairs is not None else None
    # Use the pairs only if they explain the scores, which may count other questions too.
    if paired is not None and math.isclose(paired.value, value, abs_tol=1e-6):
        return paired
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return Delta(value=value)
    # Independent scores: the distances to the ends of their intervals add in quadrature.
    below = math.hypot(new.value - new.low, old.high - old.value)
    above = math.hypot(new.high - new.value, old.value - old.low)
    return Delta(value=value, low=value - below, high=value + above)


def pairs_of(store: Store, manifests: Sequence[Manifest | None], directory: Path) -> list[Pairs]:
    """Return for each artifact after the first its answers paired with the first one's.

    There are no pairs without an artifact or its records of answers, or if other questions were
    asked: of another suite according to scores.json, or with another text at the same index. Files
    are written below `directory`. Raises ArtifactError if one is missing or damaged.
    """
    tables: list[Path | None] = []
    for number, manifest in enumerate(manifests):
        # By number, since an artifact may be compared with itself.
        path = directory / f"answers-{number}.parquet"
        is_there = manifest is not None and write_file(store, manifest, EXAMPLES, path)
        tables.append(path if is_there else None)
    suites = [
        _suite(store, manifest) if manifest and table else None
        for manifest, table in zip(manifests, tables, strict=True)
    ]
    found: list[Pairs] = []
    for table, suite in zip(tables[1:], suites[1:], strict=True):
        if tables[0] is None or table is None:
            found.append(Pairs(by_task={}))
        elif suites[0] is not None and suite is not None and suites[0] != suite:
            digits = " and ".join(digest[:_SHOWN_DIGITS] for digest in (suites[0], suite))
            found.append(Pairs(by_task={}, why_not=f"their suites are {digits}"))
        else:
            found.append(_paired(tables[0], table))
    return found


def _suite(store: Store, manifest: Manifest) -> str | None:
    """Return the digest of the questions asked; None if the artifact does not record it."""
    data = read_file(store, manifest, "scores.json")
    try:
        return None if data is None else json.loads(data).get("suite")
    except (ValueError, AttributeError) as error:
        raise ArtifactError(f"scores.json of {manifest.name} is no table of scores") from error


def _paired(first: Path, other: Path) -> Pairs:
    """Pair two tables of answers, without tasks that had other questions."""
    import duckdb  # here, since importing it slows down commands that do not need it

    with duckdb.connect(":memory:") as connection:
        columns = [connection.read_parquet(str(path)).columns for path in (first, other)]
        shared = [name for name in _ASKED if all(name in each for each in columns)]
        # IS NOT DISTINCT FROM, since with = two nulls would be neither the same nor different.
        same = " AND ".join(f"a.{name} IS NOT DISTINCT FROM b.{name}" for name in shared) or "true"
        rows = connection.execute(_PAIRS.format(same=same), [str(first), str(other)]).fetchall()
    others = dict.fromkeys(task for task, *_, is_same in rows if not is_same)
    by_task: dict[str, list[AnswerPair]] = {}
    for *pair, _ in rows:
        if pair[0] not in others:
            by_task.setdefault(pair[0], []).append(AnswerPair(*pair))
    return Pairs(
        by_task={task: _sum_up(task, answers) for task, answers in by_task.items()},
        why_not=f"the questions differ in {', '.join(others)}" if others else None,
    )


def _sum_up(task: str, answers: Sequence[AnswerPair]) -> Answers:
    return Answers(
        task=task,
        total=len(answers),
        kept=sum(a.is_right and a.was_right for a in answers),
        gained=sum(a.is_right and not a.was_right for a in answers),
        lost=sum(a.was_right and not a.is_right for a in answers),
        changed=tuple(a for a in answers if a.old != a.new or a.was_right != a.is_right),
    )


def _combine(one: float, other: float, correlation: float) -> float:
    """Return the distance of a difference from its end, given those of its two parts."""
    return math.sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))
