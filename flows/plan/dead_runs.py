"""Record the end of runs whose process died without recording it, in the store and in Prefect.

The modules of Prefect's requests are imported where they are used: most commands need none. A run
of a command that is killed, or that a second Ctrl-C ends at once, cannot do it itself: the
next command that looks at runs does it. It does so too for a deployed run that crashed and is not
resumed, and for a finished run whose end Prefect's server did not take.
"""

import contextlib
import time
from dataclasses import replace
from pathlib import Path

from flows.artifacts.runs import Run, find_run, timestamp, write_run
from flows.leases import run_lock
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, StoreError

_DIED = "its process ended; the same command resumes it"
_FINISHED = "it finished while Prefect's server did not answer"


def end_dead_runs(store: Store, home: Path) -> None:
    """Record as interrupted each run of a command of this home whose process has died.

    Repeated by the next command if the store or Prefect's server cannot be written now.
    """

    def end(run: str, is_finished: bool) -> bool:
        from infra.prefect.flow_runs import find_flow_runs, report_ended

        try:
            _end(store, run)
        except (StoreError, ArtifactError):
            return False
        found = find_flow_runs(home, run)
        if is_finished:
            found = found and [each for each in found if each.name == run]
            return report_ended(home, found, _FINISHED, as_completed=True)
        return report_ended(home, found, _DIED)

    run_lock.forget_dead(home, store.url, end)


def settle(store: Store, home: Path, run: Run) -> Run:
    """Return the record of a run, ended if Prefect knows that it ended and is not resumed."""
    if run.status != "running" or run_lock.is_held(home, run.run):
        return run
    from infra.prefect.flow_runs import find_flow_runs, report_ended

    found = find_flow_runs(home, run.run) or []
    # Without one of its name Prefect does not answer, or knows another home's runs only.
    is_known = any(each.name == run.run for each in found)
    if not is_known or any(each.is_live for each in found):
        return run
    if run_lock.is_held(home, run.run):  # it began again meanwhile
        return run
    with contextlib.suppress(StoreError, ArtifactError):
        run = _end(store, run.run) or run
    report_ended(home, found, _DIED)  # its tasks; nothing is live
    return run


def _end(store: Store, run: str) -> Run | None:
    """Return the record of a run, ended now unless it has ended; None if it wrote none.

    The record is read once its process is known to be gone: until then it may change.
    """
    found = find_run(store, run)
    if found is not None and found.status == "running":
        found = replace(found, status="interrupted", ended=timestamp(time.time()))
        write_run(store, found)
    return found
