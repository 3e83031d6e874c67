"""The starts of one flow run, counted as long as none gets further than those before.

A crashed flow run is resumed by itself, which has to end when it only crashes again. What its
starts reached is in the records of its runs, so that another process on another machine counts on:
artifacts that are built, and steps of checkpoints from which the next start resumes.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flows.artifacts.runs import Run, find_run, write_run
from flows.plan.plan import StagePlan
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError


@dataclass(frozen=True, kw_only=True)
class Starts:
    """What the starts before this one reached."""

    number: int  # of this start, from 1
    progressed: int = 0  # the newest start that is known to have got further; 0: none
    reached: Mapping[str, Mapping[str, int]]  # by run id: see Run.reached

    @property
    def idle(self) -> int:
        """Starts before this one, in a row, that are not known to have got further."""
        return self.number - 1 - self.progressed

    def add_plan(self, run: str, items: Iterable[StagePlan]) -> "Starts":
        """Return the starts with what the plan of the run finds: artifacts and checkpoints."""
        found: dict[str, int] = {}
        for item in items:
            if item.fingerprint is None:
                continue
            if item.state == "=":
                found |= _built(item.stage.name, item.fingerprint)
            elif item.resume is not None:
                found[f"{item.stage.name}/{item.fingerprint}"] = item.resume.step
        return self.add(run, found)

    def record_in(self, run: Run) -> Run:
        """Return the run's record with what was reached, for the next start to read."""
        return replace(run, reached=dict(self.reached[run.run]), progressed=self.progressed)

    def add(self, run: str, found: Mapping[str, int]) -> "Starts":
        """Return the starts with what was found of the run, which may be what is known."""
        known = self.reached[run]
        further = {name: step for name, step in found.items() if step > known.get(name, 0)}
        if not further:
            return self
        # The start before this one made it. What exists when the first one begins is no progress.
        reached = {**self.reached, run: {**known, **further}}
        return replace(self, reached=reached, progressed=self.number - 1)


def read_starts(store: Store, runs: Sequence[str], *, number: int) -> Starts:
    """Return the starts of a flow run that writes the records of `runs`; this one has the number.

    What they built is written into their records at once: if this start dies before it writes one,
    the next must not take the same artifacts for progress. A damaged record counts as none. Safe to
    repeat. Raises StoreError if the store does not answer or refuses.
    """
    records: list[Run] = []
    for run in runs:
        with contextlib.suppress(ArtifactError):
            if (found := find_run(store, run)) is not None:
                records.append(found)
    starts = Starts(
        number=number,
        progressed=max((record.progressed for record in records), default=0),
        reached={run: {} for run in runs} | {record.run: record.reached for record in records},
    )
    for record in records:
        for stage, fingerprint in record.stages.items():
            starts = starts.add(record.run, _built(stage, fingerprint))
    for record in records:
        if (found := starts.record_in(record)).reached != record.reached:
            write_run(store, found)
    return starts


def _built(stage: str, fingerprint: str) -> dict[str, int]:
    return {f"{stage}/{fingerprint}/manifest.json": 1}
