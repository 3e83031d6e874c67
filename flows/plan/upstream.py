"""Pin mutable names upstream: a branch of a dataset to a commit, the CORE bundle to a sha256.

The pins are part of the configuration that is hashed and of the job, so two stores never hold
different data under one fingerprint. The home stores each answer for times without a network. A
run's record has its pins, and a run that resumes uses them again.
"""

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from flows.artifacts.runs import latest_runs, timestamp
from flows.datasets import published_task
from infra.storage.base import Store
from nanochat_core.config import DatasetConfig, RunConfig
from nanochat_core.data.hub.client import resolve
from nanochat_core.data.hub.datasets import repository_of
from nanochat_core.data.hub.errors import Unreachable
from nanochat_core.errors import ConfigError
from nanochat_core.job import write_json

FORMAT = 1
FILE = "upstream.json"  # in the home
SECONDS = 5.0  # for an answer
RECENT = 600.0  # seconds in which a plan uses a stored answer and sends no request
MAX_RECORDS = 100  # of runs that are read for their pins
SECTIONS = frozenset({"shards", "task_data"})  # that can name what moves
_COMMIT = re.compile(r"[0-9a-f]{40}")

Pins: TypeAlias = dict[str, str]  # OWNER/NAME@BRANCH -> commit, URL -> sha256
Log: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A commit or sha256 and the time at which the name stood for it."""

    value: str
    when: str  # UTC, 2026-11-21T05:53:38Z
    validator: str | None = None  # of a URL: the same one means the same bytes; None: unknown


def moving_names(run: RunConfig, sections: Collection[str] = SECTIONS) -> tuple[str, ...]:
    """Return the names in these sections of a run that may stand for something else tomorrow."""
    found: list[str] = []
    if "shards" in sections and (name := _shards_name(run)):
        found.append(name)
    if "task_data" in sections:
        found += filter(None, map(_dataset_name, run.task_data.datasets))
        if run.task_data.core_bundle is not None and run.task_data.core_bundle_sha256 is None:
            found.append(run.task_data.core_bundle)
    return tuple(dict.fromkeys(found))


def apply_pins(run: RunConfig, pins: Mapping[str, str]) -> RunConfig:
    """Return `run` with every name that has a pin replaced by it."""
    shards, data = run.shards, run.task_data
    if (name := _shards_name(run)) is not None and name in pins:
        shards = dataclasses.replace(shards, revision=pins[name])
    url = data.core_bundle
    if url is not None and url in pins and data.core_bundle_sha256 is None:
        data = dataclasses.replace(data, core_bundle_sha256=pins[url])
    datasets = tuple(
        dataclasses.replace(dataset, revision=pins[name])
        if (name := _dataset_name(dataset)) is not None and name in pins
        else dataset
        for dataset in data.datasets
    )
    data = dataclasses.replace(data, datasets=datasets)
    return dataclasses.replace(run, shards=shards, task_data=data)


def pin(
    run: RunConfig,
    home: Path,
    *,
    log: Log,
    known: Mapping[str, str] | None = None,
    sections: Collection[str] = SECTIONS,
    plan: bool = False,
) -> tuple[RunConfig, Pins]:
    """Resolve the moving names in these sections of `run`, less those that are `known`.

    Send one request a name. Without a network the last answer counts, which `log` reports. A `plan`
    uses a recent answer without a request, downloads nothing and leaves a name as it is if its
    value is unknown; a run raises ConfigError then. Raises DataError if the server says that there
    is no such thing.
    """
    # A run that resumes passes its own pins as `known`: they win over what is newest today.
    names = moving_names(run, sections)
    pins = {name: value for name, value in (known or {}).items() if name in names}
    # Answers are shared by all runs of the home, so a concurrent one may overwrite ours: it costs a
    # request, no more.
    answers = _read(home / FILE) if len(pins) < len(names) else {}
    before = dict(answers)
    for name in names:
        if name in pins:
            continue
        answer = answers.get(name)
        # Not in the future either: the clock may have been set back since.
        recent = answer is not None and timestamp(time.time() - RECENT) < answer.when <= _now()
        if not (plan and recent):
            answer = _resolve(name, answer, log, plan=plan)
        if answer is not None:
            answers[name], pins[name] = answer, answer.value
    if answers != before:
        _write(home / FILE, answers)
    return apply_pins(run, pins), pins


def recorded_pins(store: Store, profile: str) -> Pins:
    """Return what each name stood for in the newest run of a profile that names it.

    Damaged records are skipped.
    """
    latest = latest_runs(store, MAX_RECORDS, unread=[])
    runs = [run for run in latest if run.profile == profile]
    # Newest first: reversed, so that the newest pin of a name overwrites older ones.
    return {name: value for run in reversed(runs) for name, value in run.upstream.items()}


def _resolve(name: str, last: Resolved | None, log: Log, *, plan: bool) -> Resolved | None:
    is_url = "://" in name
    try:
        return _ask_web(name, last, log, plan=plan) if is_url else _ask_hub(name)
    except Unreachable as error:
        last = last or (_find_archive(name) if is_url else None)
        if last is not None:
            log(f"{name} is taken to be {last.value[:12]}, as resolved {last.when}: {error}")
            return last
        if not plan:
            raise ConfigError(
                f"what {name} stands for is not known: {error}",
                hint="run once with a network, or give a commit: --set shards.revision=COMMIT"
                if not is_url
                else "run once with a network, or give --set task_data.core_bundle_sha256=SHA256; "
                "without CORE: --set task_data.core_bundle=null",
            ) from error
        _report_unresolved(name, str(error), log)
        return None


def _report_unresolved(name: str, why: str, log: Log) -> None:
    log(f"{name} is not resolved ({why}): a run will have other fingerprints than this plan")


def _shards_name(run: RunConfig) -> str | None:
    repository, revision = repository_of(run.shards), run.shards.revision
    if run.shards.source == "hub":
        revision = revision or "main"
    return None if repository is None or revision is None else _name(repository, revision)


def _dataset_name(dataset: DatasetConfig) -> str | None:
    task = published_task(dataset)
    if task is None:
        return None
    return _name(task.dataset.repository, dataset.revision or task.dataset.revision)


def _name(repository: str, revision: str) -> str | None:
    return None if _COMMIT.fullmatch(revision) else f"{repository}@{revision}"


def _now() -> str:
    return timestamp(time.time())


# The Hub.


def _ask_hub(name: str) -> Resolved:
    repository, _, revision = name.rpartition("@")
    found = resolve(repository, revision, seconds=SECONDS)
    if found is None or not _COMMIT.fullmatch(found):
        raise Unreachable(f"the Hub names no commit of {name}")
    return Resolved(value=found, when=_now())


# The CORE bundle.


def _ask_web(url: str, last: Resolved | None, log: Log, *, plan: bool) -> Resolved | None:
    """Return the last sha256 if the server's validator is the same, else that of a download.

    A plan downloads nothing and returns None then.
    """
    from nanochat_core.data.hub.core_bundle import ask_validator, fetch_archive

    validator = ask_validator(url, seconds=SECONDS)
    # No answer stored, but an earlier job may have downloaded the archive: save the download.
    last = last or _find_archive(url)
    if last is not None and validator is not None and last.validator == validator:
        return dataclasses.replace(last, when=_now())
    if plan:
        _report_unresolved(url, "its sha256 is computed when a run downloads it", log)
        return None
    digest = fetch_archive(url, validator=validator, log=log)
    return Resolved(value=digest, when=_now(), validator=validator)


def _find_archive(url: str) -> Resolved | None:
    """Return the sha256 of an earlier download, which a job would use."""
    from nanochat_core.data.hub.core_bundle import find_archive

    found = find_archive(url)
    if found is None:
        return None
    return Resolved(value=found.sha256, when=timestamp(found.when), validator=found.validator)


# The answers that the home stores.


def _read(path: Path) -> dict[str, Resolved]:
    """Return every answer; none if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        tree = json.loads(path.read_bytes())
        if tree["format"] == FORMAT:
            return {name: Resolved(**answer) for name, answer in tree["answers"].items()}
    return {}


def _write(path: Path, answers: Mapping[str, Resolved]) -> None:
    with contextlib.suppress(OSError):  # the next run asks again
        path.parent.mkdir(parents=True, exist_ok=True)
        tree = {name: asdict(answer) for name, answer in answers.items()}
        write_json(path, {"format": FORMAT, "answers": tree})
