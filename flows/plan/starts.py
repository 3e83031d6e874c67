"""Count the starts of one flow run since the last one that made progress.

A crashed flow run is restarted automatically, which has to stop if it only crashes again. Progress
is an artifact that was built, or a later checkpoint to resume from. It is written into the records
of the flow run's runs, so that a process on another machine continues the count.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flows.artifacts.runs import Run, find_run, write_run
from flows.identity.ref import ArtifactRef
from flows.plan.plan import StagePlan
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError


@dataclass(frozen=True, kw_only=True)
class Starts:
    """The number of this start, and the progress of the starts before it."""

    number: int  # of this start, from 1
    progressed: int = 0  # the newest start that is known to have made progress; 0: none
    reached: Mapping[str, Mapping[str, int]]  # by run id: see Run.reached
    began: Mapping[str, str] = field(default_factory=dict[str, str])  # by run id: the first start

    @property
    def idle(self) -> int:
        """Return the number of starts, up to the last one, without known progress."""
        return self.number - 1 - self.progressed

    def add_plan(self, run: str, items: Iterable[StagePlan]) -> "Starts":
        """Return the starts with the artifacts and checkpoints in the plan of a run."""
        found: dict[str, int] = {}
        for item in items:
            if (ref := item.ref) is None:
                continue
            if item.state == "=":
                found |= _built(ref)
            elif item.resume is not None:
                found[ref.prefix] = item.resume.step
        return self.add(run, found)

    def record_in(self, run: Run) -> Run:
        """Return the run's record with its first start, and its progress for the next start."""
        return replace(
            run,
            started=self.began.get(run.run, run.started),
            reached=dict(self.reached[run.run]),
            progressed=self.progressed,
        )

    def add(self, run: str, found: Mapping[str, int]) -> "Starts":
        """Return the starts with a run's progress, `self` if `found` adds nothing."""
        known = self.reached[run]
        further = {name: step for name, step in found.items() if step > known.get(name, 0)}
        if not further:
            return self
        # The start before this one made it: hence - 1. A run without a record has not begun: what
        # exists was built by other runs.
        progressed = self.number - 1 if run in self.began else self.progressed
        reached = {**self.reached, run: {**known, **further}}
        return replace(self, reached=reached, progressed=progressed)


def read_starts(store: Store, runs: Sequence[str], *, number: int) -> Starts:
    """Return the starts of a flow run that writes the records of `runs`; this is start `number`.

    A damaged record counts as none. Idempotent. Raises StoreError if the store does not respond or
    refuses.
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
        began={record.run: record.started for record in records},
    )
    for record in records:
        for ref in record.refs:
            starts = starts.add(record.run, _built(ref))
    # Written at once: if this start dies before it writes a record, the next one must not count the
    # same artifacts as progress again.
    for record in records:
        if (found := starts.record_in(record)).reached != record.reached:
            write_run(store, found)
    return starts


def _built(ref: ArtifactRef) -> dict[str, int]:
    # One step, beyond the 0 of an unknown name; checkpoints of the stage count under another name.
    return {ref.manifest_key: 1}
