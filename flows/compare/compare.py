"""How good several runs, or several artifacts of a stage, are: their numbers side by side.

A difference is told from the first. Where both have an interval, the difference has one too: from
the questions that both answered when there are such, else as if the two were independent. Of pairs
the interval is Newcombe's (1998, method 10), which holds with few changed answers too, and whether
the difference is clear is McNemar's exact test. It says what other questions might have changed;
not what another seed of training might have.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.compare.tables import EXAMPLES, eval_rows, write_file
from flows.identity.manifest import Manifest
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError
from nanochat_core.evaluate.intervals import wilson_interval

_ASKED = ("prompt", "expected", "gold")  # columns that tell a question from another at its place
_LEVEL = 0.05  # of the test
_SHOWN_DIGITS = 12  # of a suite's digest
_PAIRS = """
SELECT a.task, a.place, a.answer::VARCHAR, b.answer::VARCHAR, a.correct, b.correct, {same}
FROM read_parquet(?) a JOIN read_parquet(?) b USING (task, place) ORDER BY a.task, a.place
"""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number that an artifact measured, and its 95 % interval if it has one."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Delta:
    """How far a score is from the first one's."""

    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None  # McNemar's exact; None: not of pairs

    @property
    def is_clear(self) -> bool:
        """Whether other questions of the same kind would seldom explain it: once in twenty times.

        Of pairs that is the exact test's word, else whether the interval leaves out 0.
        """
        if self.p is not None:
            return self.p < _LEVEL
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True, kw_only=True)
class AnswerPair:
    """A question that two answered differently, or one of them wrongly."""

    task: str
    place: int  # among the task's questions
    old: str
    new: str
    was_right: bool
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What became of the questions of a task that the first and another both answered."""

    task: str
    total: int
    kept: int  # right before and here
    gained: int  # wrong before, right here
    lost: int
    changed: tuple[AnswerPair, ...]  # every question whose answer or verdict is another

    @property
    def delta(self) -> Delta:
        """Of the share of right answers."""
        low, high = paired_interval(self.total, self.kept, self.gained, self.lost)
        value = (self.gained - self.lost) / self.total
        return Delta(value=value, low=low, high=high, p=mcnemar(self.gained, self.lost))


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The answers of one artifact beside those of the first."""

    by_task: Mapping[str, Answers]
    why_not: str | None = None  # why questions, some or all, are not paired


def paired_interval(total: int, kept: int, gained: int, lost: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares of the same `total` questions, later less
    earlier: the shares' Wilson intervals put together, with their correlation (Newcombe 1998,
    Statistics in Medicine 17:2635, method 10)."""
    neither = total - kept - gained - lost
    old, new = kept + lost, kept + gained
    (old_low, old_high), (new_low, new_high) = (wilson_interval(n, total) for n in (old, new))
    scale = math.sqrt(old * (total - old) * new * (total - new))
    both = kept * neither - gained * lost
    both = max(both - total / 2, 0) if both > 0 else both  # his correction for continuity
    correlation = both / scale if scale else 0.0
    old_share, new_share = old / total, new / total
    below = _put_together(new_share - new_low, old_high - old_share, correlation)
    above = _put_together(new_high - new_share, old_share - old_low, correlation)
    value = (gained - lost) / total
    return value - below, value + above


def mcnemar(gained: int, lost: int) -> float:
    """How probable at least so uneven a change is where gain and loss are equally likely: both
    tails of a binomial distribution, exact. 1 where nothing changed."""
    changed = gained + lost
    tail, ways = 0, 1  # of `few` among the changed
    for few in range(min(gained, lost) + 1):
        tail += ways
        ways = ways * (changed - few) // (few + 1)
    return min(1.0, 2 * tail / 2**changed)


def scores_of(manifest: Manifest) -> dict[str, Score]:
    """Every number that an artifact measured, by name."""
    return {
        row["metric"]: Score(value=row["value"], low=row["low"], high=row["high"])
        for row in eval_rows(manifest)
    }


def delta_of(old: Score, new: Score, pairs: Answers | None) -> Delta:
    """The difference of two scores; `pairs` are the questions that they are shares of, if known."""
    value = new.value - old.value
    paired = pairs.delta if pairs is not None else None
    if paired is not None and math.isclose(paired.value, value, abs_tol=1e-6):
        return paired
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return Delta(value=value)
    below = math.hypot(new.value - new.low, old.high - old.value)
    above = math.hypot(new.high - new.value, old.value - old.low)
    return Delta(value=value, low=value - below, high=value + above)


def answers_of(
    store: Store, manifests: Sequence[Manifest], directory: Path
) -> list[Mapping[str, Answers]]:
    """For each artifact after the first, by task, its answers beside the first one's."""
    return [pairs.by_task for pairs in pairs_of(store, manifests, directory)]


def pairs_of(store: Store, manifests: Sequence[Manifest], directory: Path) -> list[Pairs]:
    """For each artifact after the first its answers beside the first one's.

    Without records of answers there are none, nor where other questions were asked: of another
    suite, by scores.json, or another text at a question's place. Files are written below
    `directory`. Raises ArtifactError when one is gone or damaged.
    """
    tables: list[Path | None] = []
    for number, manifest in enumerate(manifests):
        path = directory / f"{manifest.stage}-{number}.parquet"
        tables.append(path if write_file(store, manifest, EXAMPLES, path) else None)
    suites = [
        _suite(store, manifest, directory / f"{manifest.stage}-{number}.json") if table else None
        for number, (manifest, table) in enumerate(zip(manifests, tables, strict=True))
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


def _suite(store: Store, manifest: Manifest, path: Path) -> str | None:
    """What was asked, as a digest; None where the artifact does not tell."""
    if not write_file(store, manifest, "scores.json", path):
        return None
    try:
        return json.loads(path.read_bytes()).get("suite")
    except (ValueError, AttributeError) as error:
        raise ArtifactError(f"scores.json of {manifest.name} is no table of scores") from error


def _paired(first: Path, other: Path) -> Pairs:
    """Two tables of answers side by side, but for tasks that had other questions."""
    import duckdb

    with duckdb.connect(":memory:") as connection:
        columns = [
            {
                str(row[0])
                for row in connection.execute(
                    "DESCRIBE SELECT * FROM read_parquet(?)", [str(path)]
                ).fetchall()
            }
            for path in (first, other)
        ]
        shared = [name for name in _ASKED if all(name in each for each in columns)]
        same = " AND ".join(f"a.{name} IS NOT DISTINCT FROM b.{name}" for name in shared) or "true"
        rows: list[tuple[str, int, str, str, bool, bool, bool]] = connection.execute(
            _PAIRS.format(same=same), [str(first), str(other)]
        ).fetchall()
    others = dict.fromkeys(task for task, *_, is_same in rows if not is_same)
    by_task: dict[str, list[AnswerPair]] = {}
    for task, place, old, new, was_right, is_right, _ in rows:
        if task not in others:
            by_task.setdefault(task, []).append(
                AnswerPair(
                    task=task,
                    place=place,
                    old=old,
                    new=new,
                    was_right=was_right,
                    is_right=is_right,
                )
            )
    return Pairs(
        by_task={task: _sum_up(task, answers) for task, answers in by_task.items()},
        why_not=f"other questions stand at the places of {', '.join(others)}" if others else None,
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


def _put_together(one: float, other: float, correlation: float) -> float:
    """How far a difference may be, of whose two parts each may be so far."""
    return math.sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))
