"""The store's record of a checkpoint: {place}/COMMIT.json, put after its files.

flows/artifacts/checkpoints.py uploads and fetches the checkpoints.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NotRequired, TypeAlias, TypedDict

from flows.identity.manifest import File
from flows.identity.record_types import Count, find_record
from flows.identity.records import unless_damaged
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError

FORMAT = 3
COMMIT = "COMMIT.json"
PLACE = re.compile(r"step-([0-9]{7,18})/[^/]+")  # below the checkpoints of a fingerprint

Log: TypeAlias = Callable[[str], None]


class _CommittedFile(TypedDict):
    size: Count
    sha256: str


class _Commit(TypedDict):
    """The fields that are read of a job's own COMMIT.json."""

    format: NotRequired[int]
    step: Count
    total: Count
    files: dict[str, Annotated[dict[str, Any], _CommittedFile]]


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A committed checkpoint in the store."""

    step: Count
    total: Count
    files: tuple[File, ...]
    commit: Annotated[dict[str, Any], _Commit]  # the job's own COMMIT.json
    owner: str  # of the lease it was written under
    epoch: Count  # its fencing token


def committed(store: Store, root: str) -> list[tuple[int, str]]:
    """Return step and key prefix of each committed checkpoint in the store, newest step first.

    A key that no version of this program writes is ignored.
    """
    keys = [entry.key.removeprefix(f"{root}/") for entry in store.list(f"{root}/step-")]
    names = [key.removesuffix(f"/{COMMIT}") for key in keys if key.endswith(f"/{COMMIT}")]
    found = [(int(m[1]), f"{root}/{m[0]}") for m in map(PLACE.fullmatch, names) if m]
    return sorted(found, reverse=True)


def open_whole(
    store: Store, root: str, *, step: int | None = None, log: Log = lambda text: None
) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints below `root`, of one step or all, newest first.

    Those with a damaged record are logged and skipped. Raises StoreError.
    """
    for found_step, place in committed(store, root):
        read = partial(open_record, store, place)
        if step in (None, found_step) and (found := unless_damaged(read, log)):
            yield found


def open_record(store: Store, place: str) -> StoredCheckpoint:
    """Return the checkpoint whose record lies at `place`. Raises ArtifactError, StoreError."""
    key = f"{place}/{COMMIT}"
    found = find_record(store, key, StoredCheckpoint, format=FORMAT, what="a checkpoint")
    if found is None:
        raise ArtifactError(f"{store.url}/{key} is gone")
    # A whole record under the key of another step was copied or moved there.
    if f"/step-{found.step:07d}/" not in key or found.commit["step"] != found.step:
        raise ArtifactError(f"{store.url}/{key} is the checkpoint of step {found.step}")
    return found
