"""Comparison of several runs, or several artifacts of a stage: scores, differences, intervals.

Differences are from the first. If both scores have an interval, the difference has one too: of
pairs if both answered the same questions or read the same text (`flows.render.paired`), else as if
the two were independent. A number without an interval, such as a loss of training, has a difference
without one.
"""

from collections.abc import Sequence
from functools import partial

from flows.artifacts.transfer import read_file
from flows.identity.manifest import Manifest
from flows.identity.records import unless_damaged
from flows.render.paired import NONE, Delta, Pairs, Score, delta_of, pair, scores_in
from infra.storage.base import Store

_LESS_IS_BETTER = ("bpb", "loss")  # suffixes of metric names


def direction(metric: str) -> int:
    """Return 1 if more of a metric is better, -1 if less is."""
    return -1 if metric.endswith(_LESS_IS_BETTER) else 1


def scores_of(manifest: Manifest) -> dict[str, Score]:
    """Return every metric of an artifact, by name."""
    return scores_in(manifest.provenance.metrics)


def delta_between(store: Store, old: Manifest, new: Manifest, metric: str) -> Delta:
    """Return the difference of a metric of two artifacts of a stage, of pairs where there are."""
    # An evaluation compared with itself differs by 0 exactly, without any interval.
    if old.fingerprint == new.fingerprint:
        return Delta(value=0.0)
    # Damaged pairs leave the scores valid; unpaired, their difference gets the wider interval.
    [pairs] = unless_damaged(lambda: pairs_of(store, [old, new])) or [NONE]
    before, after = (scores_of(manifest)[metric] for manifest in (old, new))
    return delta_of(before, after, pairs.differences.get(metric))


def pairs_of(store: Store, manifests: Sequence[Manifest | None]) -> list[Pairs]:
    """Return for each artifact after the first its pairs with the first one.

    There are none without an artifact, or its files. Raises ArtifactError if a file is missing or
    damaged.
    """

    def read(manifest: Manifest | None, name: str) -> bytes | None:
        return read_file(store, manifest, name) if manifest else None

    first, *others = ((m.name if m else "", partial(read, m)) for m in manifests)
    return [pair(first, other) for other in others]
