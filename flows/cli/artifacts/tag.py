"""`nanochat tag`: give a run a name, such as main or best; list or remove these names."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from flows.artifacts.listing import GONE, Tagged, list_tags, read_tag
from flows.artifacts.names import hint_for, kind_of, open_run
from flows.artifacts.pins import reserve
from flows.artifacts.runs import check_name, find_run, point, remove_tag
from flows.cli.options import AsJson, StoreOptions
from flows.cli.output import age, print_note, print_result
from flows.render.table import Table, texts
from flows.stages import STAGES
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError

_COLUMNS = texts("tag", "run", "status", "stages", "started", "")


def tag(
    name: str | None = None,
    reference: Annotated[str | None, Parameter(name="REF")] = None,
    /,
    *,
    delete: bool = False,
    place: StoreOptions = StoreOptions(),
    as_json: AsJson = False,
) -> None:
    """Point a tag at a run, so that sft@main is what it made; or list the tags.

    Args:
        name: The tag, a word of your own. Default: list all tags.
        reference: A run's id, a name (its newest finished run), another tag, or an artifact
            (sft@tiny, sft/1a2b3c: the run it is of). Default: show what the tag points at.
        delete: Remove the tag; the run stays as it is.
    """
    store = place.open_store()
    if delete:
        if name is None or reference is not None:
            raise ConfigError("--delete takes one tag", hint="nanochat tag --delete NAME")
        tree, lines = _delete(store, name)
    elif name is not None and reference is not None:
        tree, lines = _point(store, name, reference)
    else:
        tree, lines = _list(store, name)
    print_result(lambda: tree, lines, as_json=as_json)


def _point(store: Store, name: str, reference: str) -> tuple[Any, list[str]]:
    _check_free(store, name)
    run = open_run(store, reference)
    # `reserve` may repeat the call after a collection; the first result is what the tag stood for.
    before: list[str | None] = []

    def record() -> None:
        before.append(point(store, name, run.run))

    reserve(store, record, log=print_note, pause=time.sleep)
    old = before[0]
    # Look again after it is written: a collection that began earlier may have deleted the run.
    if find_run(store, run.run) is None:
        point(store, name, old) if old else remove_tag(store, name)
        raise ArtifactError(
            f"run {run.run} was deleted while it was tagged",
            hint=f"point it at another one: nanochat tag {name} RUN",
        )
    line = f"{name} -> {run.run} ({run.status}, {len(run.stages)} of {len(STAGES)} stages)"
    if old == run.run:
        line += ", as before"
    elif old:
        line = line.replace(" -> ", f": {old} -> ", 1)
    return {"tag": name, "run": run.run, "before": old}, [line]


def _check_free(store: Store, name: str) -> None:
    """Raise ConfigError for a name with another meaning, which the tag would hide."""
    check_name(name)
    # `runs_called` looks for a tag before a run's name.
    if (kind := kind_of(name, store)) not in (None, "a tag"):
        raise ConfigError(
            f"{name} is {kind}: a tag called so would hide it",
            hint="choose another name, such as main",
        )


def _delete(store: Store, name: str) -> tuple[Any, list[str]]:
    old = _find(store, name).run or None  # None: it is damaged, and can be removed too
    remove_tag(store, name)
    line = f"{name} removed; it pointed at {old}" if old else f"{name} removed; it was damaged"
    return {"tag": name, "run": None, "before": old}, [line]


def _list(store: Store, name: str | None) -> tuple[Any, Sequence[str | Table]]:
    tags = list_tags(store) if name is None else [_find(store, name)]
    table = Table(columns=_COLUMNS, rows=[*map(_row, tags)])
    lines = [table if tags else "no tags yet: nanochat tag main RUN"]
    return [_to_tree(tagged) for tagged in tags], lines


def _row(tagged: Tagged) -> tuple[str, ...]:
    run, known = tagged.record, ("", "", "")
    if run is not None:
        known = (run.status, f"{len(run.stages)}/{len(STAGES)}", age(run.started))
    return (tagged.name, tagged.run, *known, tagged.problem)


def _to_tree(tagged: Tagged) -> dict[str, Any]:
    run = tagged.record
    return {
        "tag": tagged.name,
        "run": tagged.run or None,
        "status": run.status if run else None,
        "stages": run.stages if run else None,
        "problem": tagged.problem or None,
    }


def _find(store: Store, name: str) -> Tagged:
    """Return a tag, also a damaged one. Raises ConfigError if there is none."""
    check_name(name)
    found = read_tag(store, name)
    if found.problem == GONE:
        hint = hint_for(name, "tag", store)
        raise ConfigError(f"there is no tag {name} in {store.url}", hint=hint)
    return found
