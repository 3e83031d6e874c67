"""Count how often a recipe's artifact was asked for again: {stage}/{fingerprint}/redo.json.

An artifact is never replaced. A run that needs another one of the same recipe (`--force`, or the
artifact was revoked) raises the recipe's number, which is part of the fingerprint; 0 is left out of
it. So the new artifact has a key, a lease, checkpoints and a work directory of its own. The record
lies under the recipe, the fingerprint with number 0. Nothing deletes it: without it plans would
find the first artifact again.
"""

from dataclasses import asdict, dataclass
from typing import Any

from flows.identity.record_types import Count, find_record, find_versioned
from flows.identity.records import encode_record
from flows.identity.ref import ArtifactRef
from infra.storage.base import Store

FORMAT = 1
_ABOUT: Any = {
    "format": FORMAT,
    "what": "a redo counter",
    "mend": "delete it; plans then find the recipe's first artifact until its stage is forced "
    "again",
}


@dataclass(frozen=True, kw_only=True)
class RedoCounter:
    """The number of a recipe's wanted artifact."""

    number: Count = 0
    before: Count = 0  # the number of the artifact that there was when this one was asked for
    runs: tuple[str, ...] = ()  # ids of all runs that asked: a run asks once


def find_redo(store: Store, recipe: ArtifactRef) -> RedoCounter:
    """Return a recipe's counter. Raises StoreError, ArtifactError if it is damaged."""
    return find_record(store, recipe.redo_key, RedoCounter, **_ABOUT) or RedoCounter()


def raise_redo(store: Store, recipe: ArtifactRef, known: RedoCounter, wanted: RedoCounter) -> None:
    """Write a recipe's counter if it is still `known`. Raises as `find_redo` does.

    Else another process was quicker: the caller reads the counter again and decides again.
    """
    key, data = recipe.redo_key, encode_record(asdict(wanted), format=FORMAT)
    found = find_versioned(store, key, RedoCounter, **_ABOUT)
    if found is None and known == RedoCounter():
        store.put_if_absent(key, data)
    elif found is not None and found[0] == known:
        store.put_if_same(key, data, version=found[1].version)
