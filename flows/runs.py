"""What runs there were, and names for what they made: runs/{run}.json and refs/{name}.json.

A run's name is its profile's unless the person gave one; its id adds the time. `sft@tiny` is the
sft artifact of the latest run called tiny, unless refs/tiny.json points at a certain run.
"""

import datetime
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from flows.artifacts import find_manifest
from flows.documents import find_document, seal
from flows.manifest import Manifest
from infra.storage.base import Store, check_key
from nanochat_core.errors import ArtifactError

FORMAT = 2
Status: TypeAlias = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One execution of the pipeline."""

    run: str  # its id: name, time, a few random digits
    name: str
    profile: str
    depth: int | None  # as the person overrode it
    overrides: tuple[str, ...]  # section.name=value, as given
    status: Status
    started: str  # UTC, 2026-11-21T05:53:38Z
    ended: str | None
    stages: dict[str, str]  # stage -> fingerprint, of the artifacts known so far


def timestamp(seconds: float) -> str:
    """Unix seconds as UTC text: 2026-11-21T05:53:38Z."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_run_id(name: str, started: str) -> str:
    """An id that no other run has; ids of one name sort by time."""
    stamp = "".join(c for c in started.lower() if c.isalnum())
    return f"{name}-{stamp}-{uuid.uuid4().hex[:4]}"


def write_run(store: Store, run: Run) -> None:
    """Record a run: at its start, and again whenever it knows more."""
    store.put(f"runs/{run.run}.json", seal(asdict(run), format=FORMAT))


def find_run(store: Store, run: str) -> Run | None:
    """The record of a run by its id."""
    tree = find_document(store, f"runs/{run}.json", format=FORMAT)
    if tree is None:
        return None
    try:
        tree["overrides"] = tuple(tree["overrides"])
        return Run(**tree)
    except (TypeError, KeyError) as error:
        raise ArtifactError(
            f"{store.url}/runs/{run}.json is not a run's record: {error}"
        ) from error


def newest_runs(store: Store, name: str) -> Iterator[Run]:
    """Every run called `name`, newest first; read one by one."""
    for entry in reversed(list(store.list(f"runs/{name}-"))):
        run = find_run(store, entry.key.removeprefix("runs/").removesuffix(".json"))
        if run is not None and run.name == name:
            yield run


def point(store: Store, name: str, run: str) -> None:
    """Make `name` stand for the run with id `run`."""
    store.put(f"refs/{name}.json", seal({"run": run}, format=FORMAT))


def resolve(store: Store, reference: str) -> Manifest:
    """The artifact called STAGE@NAME; NAME is a ref, a run's id or a run's name, in this order.

    Of the runs of one name it is the latest that made this stage. Raises ArtifactError.
    """
    stage, at, name = reference.partition("@")
    if not at:
        raise ArtifactError(f"'{reference}' is no artifact's name", hint="one is like sft@tiny")
    check_key(f"{stage}/{name}")
    for run in _runs_called(store, name):
        if stage in run.stages and (manifest := find_manifest(store, stage, run.stages[stage])):
            return manifest
    known = sorted({e.key.removeprefix("runs/").rsplit("-", 2)[0] for e in store.list("runs/")})
    raise ArtifactError(
        f"there is no {reference} in {store.url}",
        hint=f"runs there: {', '.join(known)}" if known else f"make one: nanochat run {name}",
    )


def _runs_called(store: Store, name: str) -> Iterator[Run]:
    ref = find_document(store, f"refs/{name}.json", format=FORMAT)
    run = find_run(store, str(ref["run"]) if ref else name)
    if run is not None:
        yield run
    else:
        yield from newest_runs(store, name)
