"""Comparison of several runs, or several artifacts of a stage: scores, differences, intervals.

Differences are from the first. If both scores have an interval, the difference has one too: of
pairs if both answered the same questions or read the same text (`flows.render.paired`), else as if
the two were independent. A number without an interval, such as a loss of training, has a difference
without one.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from flows.compare.tables import eval_rows, write_file
from flows.identity.manifest import Manifest
from flows.render.paired import FILES, NONE, Delta, Pairs, Score, delta_of, pair
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError


def scores_of(manifest: Manifest) -> dict[str, Score]:
    """Return every metric of an artifact, by name."""
    return {
        row["metric"]: Score(value=row["value"], low=row["low"], high=row["high"])
        for row in eval_rows(manifest)
    }


def delta_between(store: Store, old: Manifest, new: Manifest, metric: str) -> Delta:
    """Return the difference of a metric of two artifacts of a stage, of pairs where there are."""
    # An evaluation compared with itself differs by 0 exactly, without any interval.
    if old.fingerprint == new.fingerprint:
        return Delta(value=0.0)
    try:
        [pairs] = pairs_of(store, [old, new])
    except ArtifactError:
        # The scores are still valid; unpaired, their difference gets the wider interval.
        pairs = NONE
    before, after = (scores_of(manifest)[metric] for manifest in (old, new))
    return delta_of(before, after, pairs.differences.get(metric))


def pairs_of(store: Store, manifests: Sequence[Manifest | None]) -> list[Pairs]:
    """Return for each artifact after the first its pairs with the first one.

    There are none without an artifact, or its files. Raises ArtifactError if a file is missing or
    damaged.
    """
    with tempfile.TemporaryDirectory(prefix="nanochat-pairs-") as directory:
        # By number, since an artifact may be compared with itself.
        rooms = [Path(directory) / str(number) for number in range(len(manifests))]
        for room, manifest in zip(rooms, manifests, strict=True):
            room.mkdir()
            if manifest is not None:
                for name in FILES:
                    write_file(store, manifest, name, room / name)
        return [pair(rooms[0], room) for room in rooms[1:]]
