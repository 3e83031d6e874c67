"""Read the CORE metric's tasks from its published bundle.

    core.yaml            icl_tasks: label, dataset_uri, num_fewshot, icl_task_type, ...
    eval_meta_data.csv   "Eval Task", "Random baseline" in percent, ...
    eval_data/           {dataset_uri}: JSONL

A line of the three kinds of tasks:

    multiple_choice      {"query", "choices": [...], "gold"}                  which choice follows
    schema               {"context_options": [...], "continuation", "gold"}   which precedes it
    language_modeling    {"context", "continuation"}                   is it the model's own choice

Examples are shuffled as in nanochat, then cut, so scores on part of a task are comparable too.
"""

import csv
import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nanochat_core.errors import DataError

KINDS: Mapping[str, tuple[str, ...]] = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
OPTIONS = {"multiple_choice": "choices", "schema": "context_options"}
SHUFFLE_SEED = 1337  # nanochat's
_TEXT = (str, int, float)  # numbers are formatted as Python prints them
_HINT = "the bundle is damaged or of another format: `nanochat run --force task_data`"


@dataclass(frozen=True, kw_only=True)
class CoreTask:
    """One task: its examples and how they are formatted."""

    label: str
    kind: str  # of KINDS
    num_shots: int
    delimiter: str  # between a question and its answer
    baseline: float  # accuracy of guessing, 0 to 1
    items: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class CoreSuite:
    """All tasks of a bundle."""

    tasks: tuple[CoreTask, ...]
    failed: Mapping[str, str]  # label -> why the task cannot be read
    digest: str  # of everything that was read, and of max_per_task


def open_suite(directory: Path, *, max_per_task: int | None) -> CoreSuite:
    """Read the tasks of the bundle in `directory`, at most `max_per_task` examples of each.

    A task with an invalid file or line is in `failed`. Raises DataError if the list of tasks
    cannot be read.
    """
    digest = hashlib.sha256(f"core {max_per_task}".encode())
    entries = _read_entries(directory / "core.yaml", digest)
    baselines = _read_baselines(directory / "eval_meta_data.csv", digest)
    if not entries:
        raise DataError("core.yaml names no task", hint=_HINT)
    tasks: list[CoreTask] = []
    failed: dict[str, str] = {}
    for entry in entries:
        try:
            tasks.append(_open_task(directory, entry, baselines, max_per_task, digest))
        except DataError as error:  # without this machine's path: the text is in an artifact
            failed[str(entry["label"])] = str(error).replace(f"{directory}/", "")
    return CoreSuite(tasks=tuple(tasks), failed=failed, digest=digest.hexdigest())


def _open_task(
    directory: Path,
    entry: Mapping[str, Any],
    baselines: Mapping[str, float],
    max_per_task: int | None,
    digest: Any,
) -> CoreTask:
    label, kind = str(entry["label"]), str(entry["icl_task_type"])
    if label not in baselines:
        raise DataError(f"eval_meta_data.csv has no baseline of '{label}'", hint=_HINT)
    # At 100 no score is above guessing; NaN is refused too.
    if not 0 <= baselines[label] < 100:
        raise DataError(f"the baseline of '{label}' is {baselines[label]:g} percent", hint=_HINT)
    if kind not in KINDS:
        raise DataError(
            f"core.yaml: '{label}' is of type '{kind}'", hint=f"known are {', '.join(KINDS)}"
        )
    items = _read_items(directory / "eval_data" / str(entry["dataset_uri"]), kind, digest)
    # Shuffled whole, then cut: the first n are the same for every `max_per_task`.
    random.Random(SHUFFLE_SEED).shuffle(items)
    return CoreTask(
        label=label,
        kind=kind,
        num_shots=int(entry["num_fewshot"][0]),
        delimiter=str(entry.get("continuation_delimiter", " ")),
        # The table has percent.
        baseline=0.01 * baselines[label],
        items=tuple(items[:max_per_task]),
    )


def _read_entries(path: Path, digest: Any) -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = yaml.safe_load(_read(path, digest))["icl_tasks"]
        for entry in entries:
            if missing := {"label", "dataset_uri", "icl_task_type"} - entry.keys():
                raise KeyError(*sorted(missing))
            if int(entry["num_fewshot"][0]) < 0:
                raise ValueError(f"num_fewshot is {entry['num_fewshot']}")
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError) as error:
        problem = getattr(error, "problem", None) or repr(error)  # a YAMLError's repr has addresses
        raise DataError(f"{path} is no list of CORE tasks: {problem}", hint=_HINT) from error
    return entries


def _read_baselines(path: Path, digest: Any) -> dict[str, float]:
    rows = csv.DictReader(_read(path, digest).splitlines())
    try:
        return {row["Eval Task"]: float(row["Random baseline"]) for row in rows}
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise DataError(f"{path} is no table of baselines: {error!r}", hint=_HINT) from error


def _read_items(path: Path, kind: str, digest: Any) -> list[Mapping[str, Any]]:
    items: list[Mapping[str, Any]] = []
    # Not splitlines: it also splits at characters that a text may contain, such as U+2028.
    for number, line in enumerate(_read(path, digest).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            _check(item, kind)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path} line {number} is no example of {kind}: {error!r}", hint=_HINT
            ) from error
        items.append(item)
    if not items:
        raise DataError(f"{path} has no examples", hint=_HINT)
    return items


def _check(item: Any, kind: str) -> None:
    """Raise TypeError, KeyError or ValueError unless `item` is an example of this kind."""
    for name in KINDS[kind]:
        value = item[name]
        if name == "gold":
            if type(value) is not int or not 0 <= value < len(item[OPTIONS[kind]]):
                raise ValueError(f"gold is {value!r}")
        elif name in OPTIONS.values():
            if not isinstance(value, list) or not all(isinstance(text, _TEXT) for text in value):
                raise TypeError(f"{name} is not a list of texts")
        elif not isinstance(value, _TEXT):
            raise TypeError(f"{name} is not a text")


def _read(path: Path, digest: Any) -> str:
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint=_HINT) from error
    # Of each file's digest, so that moving bytes between files changes the suite's digest.
    digest.update(hashlib.sha256(data).digest())
    return text
