"""How good several runs, or several artifacts of a stage, are: their numbers side by side.

A difference is told from the first. Where both have an interval, the difference has one too: from
the questions that both answered when there are such (the pairs, McNemar's way), else as if the two
were independent. It says what other questions might have changed; not what another seed of training
might have.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.manifest import Manifest
from flows.tables import EXAMPLES, eval_rows, write_file
from infra.storage.base import Store

DEVIATIONS = 1.959964  # of a normal distribution, around 95 % of it
_PAIRS = """
SELECT a.task, a.place, a.answer::VARCHAR, b.answer::VARCHAR, a.correct, b.correct
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

    @property
    def is_clear(self) -> bool:
        """Whether its interval leaves out no difference at all."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True, kw_only=True)
class Answer:
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
    gained: int  # wrong before, right here
    lost: int
    changed: tuple[Answer, ...]  # every question whose answer or verdict is another

    @property
    def delta(self) -> Delta:
        """Of the share of right answers."""
        value = (self.gained - self.lost) / self.total
        spread = max(0.0, (self.gained + self.lost) / self.total - value**2)
        half = DEVIATIONS * math.sqrt(spread / self.total)
        return Delta(value=value, low=value - half, high=value + half)


def scores_of(manifest: Manifest) -> dict[str, Score]:
    """Every number that an artifact measured, by name."""
    return {
        row["metric"]: Score(value=row["value"], low=row["low"], high=row["high"])
        for row in eval_rows(manifest)
    }


def delta_of(old: Score, new: Score, pairs: Answers | None) -> Delta:
    """The difference of two scores; `pairs` are the questions that they are shares of, if known."""
    value = new.value - old.value
    if pairs is not None and math.isclose(pairs.delta.value, value, abs_tol=1e-6):
        return pairs.delta
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return Delta(value=value)
    below = math.hypot(new.value - new.low, old.high - old.value)
    above = math.hypot(new.high - new.value, old.value - old.low)
    return Delta(value=value, low=value - below, high=value + above)


def answers_of(
    store: Store, manifests: Sequence[Manifest], directory: Path
) -> list[Mapping[str, Answers]]:
    """For each artifact after the first, by task, its answers beside the first one's.

    Without records of answers there are none. Files are written below `directory`. Raises
    ArtifactError when one is gone or damaged.
    """
    import duckdb

    paths: list[Path | None] = []
    for number, manifest in enumerate(manifests):
        path = directory / f"{manifest.stage}-{number}.parquet"
        paths.append(path if write_file(store, manifest, EXAMPLES, path) else None)
    first, *others = paths
    found: list[Mapping[str, Answers]] = []
    with duckdb.connect(":memory:") as connection:
        for other in others:
            rows: list[tuple[str, int, str, str, bool, bool]] = []
            if first is not None and other is not None:
                rows = connection.execute(_PAIRS, [str(first), str(other)]).fetchall()
            by_task: dict[str, list[Answer]] = {}
            for task, place, old, new, was_right, is_right in rows:
                by_task.setdefault(task, []).append(
                    Answer(
                        task=task,
                        place=place,
                        old=old,
                        new=new,
                        was_right=was_right,
                        is_right=is_right,
                    )
                )
            found.append({task: _sum_up(task, answers) for task, answers in by_task.items()})
    return found


def _sum_up(task: str, answers: Sequence[Answer]) -> Answers:
    return Answers(
        task=task,
        total=len(answers),
        gained=sum(a.is_right and not a.was_right for a in answers),
        lost=sum(a.was_right and not a.is_right for a in answers),
        changed=tuple(a for a in answers if a.old != a.new or a.was_right != a.is_right),
    )
