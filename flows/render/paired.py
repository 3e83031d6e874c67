"""Two evaluations of the same questions or the same text, and the difference of their scores.

Pairs know more than two scores do: what both answer alike says nothing about the difference, so its
interval is narrower. It covers the choice of questions, not the seed of training. The files of an
evaluation are those of `nanochat_core.evaluate.base` and `chat`. An artifact without its answers,
and a score that is no share of them, have no pairs.
"""

import importlib
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from flows.render.text import number
from nanochat_core.errors import ArtifactError
from nanochat_core.evaluate.intervals import (
    Interval,
    difference_of,
    paired_difference,
    ratio_of,
    weighted_sum,
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number, with the ends of its 95 % interval; None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> str:
        """The interval as "0.2 to 0.3", "" without one."""
        if self.low is None or self.high is None:
            return ""
        return f"{number(self.low)} to {number(self.high)}"

    def text(self, *, decimals: int | None = None) -> str:
        """0.25, 0.2, 0.3 -> "0.25 (0.2 to 0.3)"; without an interval the number alone.

        decimals: None means as `number` writes it. A difference has its sign.
        """
        sign = "+" if isinstance(self, Delta) else ""
        shown, *ends = (
            number(n, sign=sign) if decimals is None else f"{n:{sign}.{decimals}f}"
            for n in (self.value, self.low, self.high)
            if n is not None
        )
        return f"{shown} ({' to '.join(ends)})" if len(ends) == 2 else shown


class Delta(Score):
    """The difference of a score from an earlier or another one, with its 95 % interval."""

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes 0; False without an interval."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    @property
    def points(self) -> str:
        """The difference of two shares in percent: "+25.0 points (+14.0 to +35.0)"."""
        value, *ends = (
            f"{100 * n:+.1f}" for n in (self.value, self.low, self.high) if n is not None
        )
        return f"{value} points ({' to '.join(ends)})" if ends else f"{value} points"


def scores_in(metrics: Mapping[str, Any]) -> dict[str, Score]:
    """Return every number among metrics by name, with the ends of its interval.

    The ends are numbers called NAME_low and NAME_high; they are no scores of their own.
    """
    # In Python bool is a subclass of int, but a flag is not a measurement.
    numbers = {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    ends = {name: [numbers.get(f"{name}_low"), numbers.get(f"{name}_high")] for name in numbers}
    are_ends = {f"{name}_{end}" for name in numbers for end in ("low", "high")}
    return {
        name: Score(value=numbers[name], low=low, high=high)
        for name, (low, high) in ends.items()
        if name not in are_ends
    }


def rows_of(metrics: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Return name, value and interval of each metric, also of those that are no numbers."""
    between = {name: score.interval for name, score in scores_in(metrics).items() if score.interval}
    ends = {f"{name}_{end}" for name in between for end in ("low", "high")}
    return [(name, metrics[name], between.get(name, "")) for name in metrics if name not in ends]


EXAMPLES, LOSSES, SCORES = "examples.parquet", "losses.parquet", "scores.json"
# An evaluation's name, for errors, and a function that reads a file of it; None: it has none.
Source: TypeAlias = tuple[str, Callable[[str], bytes | None]]
_MEANS = ("core", "chatcore")  # over all tasks, each from guessing (0) to all right (1)
_ASKED = ("prompt", "expected", "gold")  # columns that identify a question
_COLUMNS = {EXAMPLES: ("task", "place", "answer", "correct"), LOSSES: ("split", "nats", "bytes")}
_SHOWN_DIGITS = 12  # of a suite's digest, in messages
# Of a difference: bits per byte have five decimals, the loss of a row two, which counts where rows
# are few and short.
_TOLERANCE = 2e-4


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Paired answers to the questions of a task, of the first artifact and another one."""

    task: str
    total: int
    kept: int  # right in both
    gained: int  # wrong in the first, right in the other
    lost: int  # right in the first, wrong in the other
    # Each question whose answer or correctness differs: task, place (the index among the task's
    # questions), old and new answer, was_right, is_right.
    changed: Sequence[Mapping[str, Any]]

    @property
    def interval(self) -> Interval:
        """The difference of the shares of right answers."""
        return paired_difference(self.total, self.kept, self.gained, self.lost)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """What one evaluation has in common with the first."""

    by_task: Mapping[str, Answers]
    differences: Mapping[str, Interval]  # by metric: a task, a mean over all tasks, bits per byte
    why_not: str | None = None  # why some or all questions are not paired


NONE = Pairs(by_task={}, differences={})


def pair(first: Source, other: Source) -> Pairs:
    """Pair two evaluations. Raises ArtifactError.

    Questions are not paired if they are of another suite according to scores.json, or of another
    text at the same index; text is not if a row has other bytes.
    """
    old, new = (_read_scores(source) for source in (first, other))
    suites = [tree.get("suite") for tree in (old, new)]
    by_task: dict[str, Answers] = {}
    if None not in suites and suites[0] != suites[1]:
        digits = " and ".join(str(digest)[:_SHOWN_DIGITS] for digest in suites)
        why_not = f"their suites are {digits}"
    else:
        by_task, why_not = _pair_answers(
            *(_read_table(source, EXAMPLES) for source in (first, other))
        )
    differences = {task: answers.interval for task, answers in by_task.items()}
    if (mean := _difference_of_means(by_task, old, new)) is not None:
        differences |= dict.fromkeys(_MEANS, mean)
    differences |= _pair_losses(*(_read_table(source, LOSSES) for source in (first, other)))
    return Pairs(by_task=by_task, differences=differences, why_not=why_not)


def delta_of(old: Score, new: Score, paired: Interval | None) -> Delta:
    """Return the difference of two scores; `paired` is that of their pairs, None without.

    Without pairs the two count as independent: a wider interval. None without both intervals.
    """
    value = new.value - old.value
    # Use the pairs only if they explain the scores, which may count other questions too.
    if paired is not None and math.isclose(paired.value, value, abs_tol=_TOLERANCE):
        return Delta(value=value, low=paired.low, high=paired.high)
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return Delta(value=value)
    apart = difference_of(
        Interval(value=new.value, low=new.low, high=new.high),
        Interval(value=old.value, low=old.low, high=old.high),
    )
    return Delta(value=value, low=apart.low, high=apart.high)


def _read_scores(source: Source) -> dict[str, Any]:
    """Return scores.json; empty without the file."""
    artifact, read = source
    data = read(SCORES)
    return {} if data is None else read_object(data, f"{SCORES} of {artifact}")


def _read_table(source: Source, name: str) -> list[dict[str, Any]]:
    """Return the rows of a table; none without the file."""
    artifact, read = source
    data = read(name)
    rows = read_rows(data, f"{name} of {artifact}") if data else []
    if missing := [column for column in _COLUMNS[name] if rows and column not in rows[0]]:
        raise ArtifactError(
            f"{name} of {artifact} has no column {missing[0]}",
            hint="another program or version wrote it; evaluate the model again: nanochat evals",
        )
    return rows


def _pair_answers(
    first: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Answers], str | None]:
    """Pair two tables of answers; why tasks are left out: they had other questions."""
    earlier = {(row["task"], row["place"]): row for row in first}
    others: dict[str, None] = {}
    by_task: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(other, key=lambda row: (row["task"], row["place"])):
        if (before := earlier.get((row["task"], row["place"]))) is None:
            continue
        if any(before[name] != row[name] for name in _ASKED if name in before and name in row):
            others[row["task"]] = None
        by_task.setdefault(row["task"], []).append(
            {
                **{"task": row["task"], "place": row["place"]},
                **{"old": str(before["answer"]), "new": str(row["answer"])},
                **{"was_right": before["correct"], "is_right": row["correct"]},
            }
        )
    paired = {task: _sum_up(task, pairs) for task, pairs in by_task.items() if task not in others}
    return paired, f"the questions differ in {', '.join(others)}" if others else None


def _sum_up(task: str, answers: Sequence[Mapping[str, Any]]) -> Answers:
    were_and_are = Counter((each["was_right"], each["is_right"]) for each in answers)
    return Answers(
        task=task,
        total=len(answers),
        kept=were_and_are[True, True],
        gained=were_and_are[False, True],
        lost=were_and_are[True, False],
        changed=[a for a in answers if a["old"] != a["new"] or a["was_right"] != a["is_right"]],
    )


def _difference_of_means(
    by_task: Mapping[str, Answers], old: Mapping[str, Any], new: Mapping[str, Any]
) -> Interval | None:
    """Return the difference of CORE or ChatCORE; None unless all tasks of both are paired."""
    tasks = new.get("tasks", {})
    baselines = [tasks[task].get("baseline") for task in by_task if task in tasks]
    is_whole = by_task.keys() == tasks.keys() == old.get("tasks", {}).keys()
    if not baselines or not is_whole or None in baselines:
        return None
    # A share is stretched so that guessing is 0 and all right is 1, and so is a difference.
    weights = [1 / (len(baselines) * (1 - baseline)) for baseline in baselines]
    return weighted_sum([answers.interval for answers in by_task.values()], weights)


def _pair_losses(
    first: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]
) -> dict[str, Interval]:
    """Return the difference of bits per byte of each split of the same text, as {split}_bpb."""
    found: dict[str, Interval] = {}
    for split in dict.fromkeys(row["split"] for row in other):
        old, new = ([row for row in rows if row["split"] == split] for rows in (first, other))
        num_bytes = [row["bytes"] for row in new]
        if num_bytes == [row["bytes"] for row in old]:
            nats = (row["nats"] - before["nats"] for row, before in zip(new, old, strict=True))
            found[f"{split}_bpb"] = ratio_of([n / math.log(2) for n in nats], num_bytes)
    return found


def read_object(data: bytes, name: object) -> dict[str, Any]:
    """Return the object of a JSON file. Raises ArtifactError, with the file's `name`."""
    try:
        tree: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{name} is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ArtifactError(f"{name} is not a JSON object")
    return cast("dict[str, Any]", tree)


def read_rows(data: bytes, name: object, columns: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of a table, of these columns if it has them; without columns of all.

    Raises ArtifactError, with the file's `name`, if it is damaged.
    """
    # Imported here: it takes 0.2 s, and most commands read no table.
    pq: Any = importlib.import_module("pyarrow.parquet")  # it has no types
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        names: list[str] = file.schema_arrow.names
        found = [each for each in names if not columns or each in columns]
        return file.read(columns=found).to_pylist()
    except (ValueError, OSError, NotImplementedError) as error:  # bases of ArrowException's
        raise ArtifactError(f"{name} cannot be read: {error}") from error
