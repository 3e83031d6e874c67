"""Read a recorded run as it is today: its plan, its given artifacts, and who builds it."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flows.artifacts.runs import Run, timestamp
from flows.cli.output import age
from flows.cli.requests import request_of_run
from flows.identity.ref import ArtifactRef
from flows.leases import run_lock
from flows.leases.lease import find_holder
from flows.plan.plan import Plan
from flows.plan.planned import plan_run
from flows.plan.upstream import Log
from flows.render.text import duration
from flows.stages import CHAT_MODELS
from infra.storage.base import Store
from nanochat_core.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    from infra.prefect.flow_runs import FlowRun


def signs_of_life(store: Store, run: str, planned: Plan | None, home: Path) -> list[str]:
    """Return in words what builds or executes the run with this id; empty if nothing does.

    Without a plan, builders on other machines are not seen.
    """
    builders = find_builders(store, run, planned, home / "work")
    lines = [f"{name.partition('/')[0]} is being built by {builders[name]}" for name in builders]
    return sorted(lines) or list(_live(run, home))


def _live(run: str, home: Path) -> Iterator[str]:
    """Yield what is known of the run with this id, for which no process builds now.

    A command may be between two stages, or wait for a device. A run on workers may wait for one, or
    was interrupted or killed and is resumed without a command.
    """
    if run_lock.is_held(home, run):
        yield "its command is running on this machine; no stage is being built now"
        return
    from infra.prefect.flow_runs import find_flow_runs

    yield from (
        describe_live(each, run) for each in find_flow_runs(home, run) or () if each.is_live
    )


def describe_live(found: "FlowRun", run: str) -> str:
    """Return in words how far a live flow run of the run with this id is."""
    what = "the run" if found.name == run else found.name.partition("/")[0]
    where = f" in the pool {found.pool}" if found.pool else ""
    if found.is_lost:
        return f"{what} crashed{where} {age(timestamp(found.since))}; `nanochat up` resumes it"
    if found.type == "SCHEDULED":
        pool = f" `{found.pool}`" if found.pool else ""
        waited = f" ({duration(time.time() - found.since)})" if found.since else ""
        return f"{what}: waiting for a free{pool} worker{waited}"
    return f"{what} is {found.state.lower()}{where}"


def uses(run: Run) -> Iterator[tuple[str, ArtifactRef]]:
    """Yield the name of each artifact given with --use, and the artifact, as far as recorded.

    The record has the fingerprint that each name had at the time; names such as sft@tiny move.
    """
    for name in run.uses:
        stage = name.partition("@" if "@" in name else "/")[0]
        # A bare name is a chat model. If the record has several, the given one is the earliest: the
        # run made the later ones from it.
        if stage == name:
            stage = next((model.name for model in CHAT_MODELS if model.name in run.stages), "")
        if ref := run.find_ref(stage):
            yield name, ref


def plan_again(run: Run, store: Store, home: Path, *, log: Log) -> Plan:
    """Return today's plan of a recorded run. Raises ArtifactError or ConfigError without one.

    `log` receives that an artifact given with --use is revoked.
    """
    given = {name: name for name in run.uses} | {name: ref.prefix for name, ref in uses(run)}
    request = request_of_run(run, use=tuple(given.values()))
    return plan_run(request, store, home, log=log, known=run.upstream, will_run=False).plan


def find_plan(store: Store, run: Run, home: Path) -> Plan | None:
    """Return today's plan of a run. None means that it cannot be planned."""
    try:
        return plan_again(run, store, home, log=lambda text: None)
    except (ArtifactError, ConfigError):  # an evaluation's run, or a profile that was removed
        return None


def find_builders(store: Store, run: str, planned: Plan | None, work: Path) -> dict[str, str]:
    """Return the builders of the stages of the run with this id, by the name of the artifact.

    They are those of the plan's stages, on any machine, also for another run; and those of this
    run's jobs on this machine that today's plan does not have: other code began them.
    """
    items = planned.stages if planned else ()
    found = {item.ref.name: item.builder for item in items if item.builder and item.ref}
    for path in work.glob("*/*/job.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, ArtifactError):
            # Not by Job.read: other code may have written other fields.
            tree = json.loads(path.read_text(encoding="utf-8"))
            ref = ArtifactRef(tree["stage"], tree["fingerprint"])
            holder = find_holder(store, ref)
            if holder and holder.record.run == run:
                found[ref.name] = str(holder)
    return found
