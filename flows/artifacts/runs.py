"""Read and write records of runs, and the names that lead to them.

names/{name}/{started}-{run}   empty; one for each run, written before its record
runs/{run}.json                the record
refs/{name}.json               a tag, which points at a run

A run that was given no name is called by `flows.overrides.default_name`; its id adds the time. A
name stands for a tag, else for the run with this id, else for the finished runs of this name, else
for its unfinished ones, newest first.
"""

import datetime
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

from flows.identity.record_types import Digest, Name, Time, find_record
from flows.identity.records import encode_record, repair_hint, shorten, unless_damaged
from flows.identity.ref import ArtifactRef, stamp
from flows.run_request import shared
from infra.parallel import in_parallel
from infra.storage.base import MAX_SEGMENT, Store, check_key
from nanochat_core.errors import ArtifactError, ConfigError, StoreError

FORMAT = 6  # of a run
TAG_FORMAT = 4
Status: TypeAlias = Literal["running", "finished", "interrupted", "failed"]

_LISTED = re.compile(r"names/([^/]+)/([0-9a-z]+-([^/]+))")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One execution of the pipeline, with the parameters that plan it again."""

    run: Name  # its id: name, time, a few random digits
    name: str
    profile: str
    depth: int | None = None
    overrides: tuple[str, ...] = ()
    until: str | None = None  # its last stage; None: all of them
    gpus: int | None = None
    place: tuple[str, ...] = ()
    # What names upstream stood for when it was planned (flows/plan/upstream.py); a resume keeps it.
    upstream: dict[str, str] = field(default_factory=dict[str, str])
    uses: tuple[str, ...] = ()  # artifacts given for their stages, as the person named them
    status: Status
    started: Time  # UTC, 2026-11-21T05:53:38Z
    ended: Time | None
    stages: dict[Name, Digest]  # stage -> fingerprint, of the artifacts known so far

    @property
    def refs(self) -> tuple[ArtifactRef, ...]:
        """Return the artifacts known so far."""
        return tuple(ArtifactRef(*item) for item in self.stages.items())

    def find_ref(self, stage: str) -> ArtifactRef | None:
        """Return the artifact of `stage`, or None if it is not known."""
        return ArtifactRef(stage, self.stages[stage]) if stage in self.stages else None


@dataclass(frozen=True, kw_only=True)
class _Tag:
    """The record of a tag."""

    tag: str
    run: Name


def timestamp(seconds: float) -> str:
    """Return unix seconds as UTC text: 2026-11-21T05:53:38Z."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_run_id(name: str, started: str) -> str:
    """Return an id that no other run has; ids of one name sort by time."""
    return f"{name}-{stamp(started)}-{uuid.uuid4().hex[:4]}"


def new_run(run: str, name: str, *requests: Any, **parameters: Any) -> Run:
    """Return the record of a run that starts now.

    It has the parameters of the requests that are recorded; single `parameters` replace them.
    """
    return Run(
        run=run,
        name=name,
        status="running",
        started=timestamp(time.time()),
        ended=None,
        stages={},
        **(shared(Run, *requests) | parameters),
    )


def check_name(name: str) -> str:
    """Return `name` if it can name a run or a tag. Raises ConfigError."""
    refusal = f"{shorten(name)} cannot be the name of a run or a tag"
    try:
        check_key(name)
    except StoreError as error:
        raise ConfigError(refusal, hint=error.hint) from error
    # The longest segment of a key with it: the entry of one of its runs.
    if "/" in name or len(f"20261121t055338z-{name}-20261121t055338z-0123") > MAX_SEGMENT:
        raise ConfigError(refusal, hint="a name is one short word, like tiny or main")
    return name


# Runs.


def write_run(store: Store, run: Run) -> None:
    """Write the record of a run: at its start, and again with each artifact."""
    # First, so that no run has a record and no name. Each run has an entry of its own: runs that
    # start or end at the same time replace nothing of each other.
    store.put(f"names/{run.name}/{stamp(run.started)}-{run.run}", b"")
    store.put(f"runs/{run.run}.json", encode_record(asdict(run), format=FORMAT))


def find_run(store: Store, run: str) -> Run | None:
    """Return the record of a run by its id, or None. Raises ArtifactError if it is damaged."""
    key = f"runs/{run}.json"
    found = find_record(store, key, Run, format=FORMAT, what="the record of a run")
    if found is not None and found.run != run:
        raise ArtifactError(
            f"{store.url}/{key} is the record of run {found.run}",
            hint=repair_hint("delete it: it was moved"),
        )
    return found


def runs_called(store: Store, name: str) -> Iterator[Run]:
    """Yield the run that `name` stands for, or the finished runs of this name, read lazily.

    They come newest first. Only if none has finished, the unfinished runs are yielded: the parts
    that one has made so far must not replace a finished model. Raises ConfigError if it cannot be
    a name, ArtifactError if a record is damaged or the run of a tag is gone.
    """
    check_name(name)
    if (tagged := find_tag(store, name)) is not None:
        yield _open_tagged(store, name, tagged)
    elif run := find_run(store, name):
        yield run
    else:
        unfinished: list[Run] = []
        has_finished = False
        for run in newest_runs(store, name):
            if run.status == "finished":
                has_finished = True
                yield run
            else:
                unfinished.append(run)
        if not has_finished:
            yield from unfinished


def newest_runs(store: Store, name: str) -> Iterator[Run]:
    """Yield every run called `name`, newest first; read lazily, in parallel after the first."""
    ids = [run for _, run in listed_runs(store, name)]
    # The first alone: most callers stop there.
    found = _read_runs(partial(find_run, store), ids[:1], ids[1:])
    return (run for run in found if run.name == name)


def _read_runs(
    read: Callable[[str], Run | None], alone: list[str], others: list[str]
) -> Iterator[Run]:
    return filter(None, chain(map(read, alone), in_parallel(read, others)))


def listed_runs(store: Store, name: str | None = None) -> list[tuple[str, str]]:
    """Return name and id of every run, or of those called `name`, newest first, by one LIST."""
    entries = store.list("names/" if name is None else f"names/{name}/")
    found = [match for entry in entries if (match := _LISTED.fullmatch(entry.key))]
    found.sort(key=lambda match: match[2], reverse=True)
    return list(dict.fromkeys((match[1], match[3]) for match in found))


def latest_runs(store: Store, count: int | None, *, unread: list[str]) -> list[Run]:
    """Return the last `count` runs of any name, or all, latest first; only these are read.

    A record that is gone is left out, and so is one that cannot be read, whose reason is appended
    to `unread`.
    """
    ids = list(dict.fromkeys(run for _, run in listed_runs(store)))

    def read(run: str) -> Run | None:
        return unless_damaged(lambda: find_run(store, run), unread.append)

    return list(_read_runs(read, [], ids[:count]))


def start_hint(store: Store) -> str:
    """Return a hint: how to run a profile, in a store that may have no run."""
    return f"{'' if listed_runs(store) else 'nothing was run yet: '}nanochat run tiny"


def known_names(store: Store) -> list[str]:
    """Return every tag and every name of a run, sorted."""
    return sorted({*tag_names(store), *(name for name, _ in listed_runs(store))})


# Tags.


def tag_names(store: Store) -> list[str]:
    """Return the name of every tag."""
    return [e.key.removeprefix("refs/").removesuffix(".json") for e in store.list("refs/")]


def find_tag(store: Store, name: str) -> str | None:
    """Return the id of the run that a tag points at, or None. Raises ArtifactError if damaged."""
    key = f"refs/{name}.json"
    try:
        tag = find_record(store, key, _Tag, format=TAG_FORMAT, what="a tag")
        if tag is not None and tag.tag != name:
            raise ArtifactError(f"{store.url}/{key} is the record of tag {tag.tag}")
    except ArtifactError as error:
        error.hint = f"point it at a run again: nanochat tag {name} RUN"
        raise
    return tag and tag.run


def point(store: Store, name: str, run: str) -> str | None:
    """Point the tag `name` at the run with id `run`; return the run it pointed at before.

    Of several processes that do so at once the last wins. A damaged record is replaced too, as if
    there had been none.
    """
    key = f"refs/{check_name(name)}.json"
    old = unless_damaged(lambda: find_tag(store, name))
    store.put(key, encode_record({"tag": name, "run": run}, format=TAG_FORMAT))
    return old


def remove_tag(store: Store, name: str) -> None:
    """Remove a tag; the run it points at stays."""
    store.delete(f"refs/{check_name(name)}.json")


def _open_tagged(store: Store, name: str, run: str) -> Run:
    found = find_run(store, run)
    if found is None:
        raise ArtifactError(
            f"tag {name} points at run {run}, which has no record in {store.url}",
            hint=f"point it at another one: nanochat tag {name} RUN",
        )
    return found


def find_whole_run(store: Store, run: str) -> Run | None:
    """Return the record of a run by its id. None also means that it is damaged."""
    return unless_damaged(lambda: find_run(store, run))


class RunRecord:
    """The record of one run, safe for threads: its stages may be built at the same time."""

    def __init__(self, store: Store, run: Run) -> None:
        self._store = store
        self._run = run
        self._lock = threading.Lock()

    def write(self) -> None:
        """Write the record to the store as it is."""
        with self._lock:
            write_run(self._store, self._run)

    def add(self, ref: ArtifactRef) -> None:
        """Record that the run uses an artifact. Writes even if it is recorded already."""
        # The write is inside the lock: an older record must not replace a newer one.
        with self._lock:
            known = {**self._run.stages, ref.stage: ref.fingerprint}
            self._run = replace(self._run, stages=known)
            write_run(self._store, self._run)

    def has(self, stages: Iterable[str]) -> bool:
        """Return whether an artifact of each of these stages is recorded."""
        with self._lock:
            return self._run.stages.keys() >= set(stages)

    def end(self, status: Status, stages: dict[str, str] | None = None) -> Run:
        """Write and return the final record. `stages` replaces the artifacts; None leaves them."""
        with self._lock:
            self._run = replace(
                self._run,
                status=status,
                ended=timestamp(time.time()),
                stages=self._run.stages if stages is None else stages,
            )
            write_run(self._store, self._run)
        return self._run
