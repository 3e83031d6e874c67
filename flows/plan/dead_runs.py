"""Record the end of a run whose process died without recording it, in the store and in Prefect.

A command that is killed, or that a second Ctrl-C ends at once, cannot do it itself: the next
command that looks at the run does it. It does so too for a deployed run that crashed and is not
resumed, and for a run whose end Prefect's server did not take.
"""

import contextlib
import time
from dataclasses import replace
from pathlib import Path

from flows.artifacts.runs import Run, find_run, timestamp, write_run
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, StoreError

_DIED = "its process ended; the same command resumes it"
_FINISHED = "it finished while Prefect's server did not answer"


def settle(store: Store, home: Path, run: Run) -> Run:
    """Return the record of a run, ended if its process is dead; have Prefect show how it ended.

    A run of a worker has ended if Prefect knows that and does not resume it. What the store or
    Prefect's server does not take now is tried again when the run is looked at again.
    """
    was_running = run.status == "running"
    if not (run.process.is_dead() if run.process else was_running):
        return run
    # Imported here: most commands need no client of Prefect.
    from infra.prefect.flow_runs import end_flow_runs, find_flow_runs

    found = find_flow_runs(home, run.run) or []
    own = [each for each in found if each.name == run.run]
    # Without one of its name Prefect does not answer, or knows another home's runs only.
    if run.process is None and (not own or any(each.is_live for each in found)):
        return run
    if was_running:
        with contextlib.suppress(StoreError, ArtifactError):
            run = _end(store, run)
    if run.status == "finished":
        # Running, or Failed: Prefect's engine reports that it could not report.
        late = [each for each in own if each.type != "COMPLETED"]
        end_flow_runs(home, late, "COMPLETED", _FINISHED)
    else:
        left = [each for each in found if was_running or each.is_live]
        end_flow_runs(home, left, "CRASHED", _DIED)
    return run


def _end(store: Store, run: Run) -> Run:
    """Return the record of a run as it is now, ended unless it has ended or began again.

    It is read once its process is known to be gone: until then it may change.
    """
    found = find_run(store, run.run) or run
    if found.status == "running" and found.process == run.process:
        found = replace(found, status="interrupted", ended=timestamp(time.time()))
        write_run(store, found)
    return found
