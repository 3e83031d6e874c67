"""The body of every Prefect task: `flows.build`, told to Prefect.

Prefect's own result cache is off: whether a stage is up to date is decided by its artifact alone. A
reused stage ends in a state named Cached with the artifact's address as its message.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed
from prefect.utilities.annotations import quote

from flows.build import Built, Site, build
from flows.shown import Reporter
from flows.stages import Stage


@task(name="stage", cache_policy=NO_CACHE, persist_result=False, retries=0)
def stage_task(stage: Stage, site: Site, inputs: dict[str, Built], *, force: bool) -> State[Built]:
    """Build `stage`, or find that it exists. Raises what `flows.build.build` raises."""
    reporter = Reporter(stage)
    manifests = {name: built.manifest for name, built in inputs.items()}

    def watch(name: str, event: dict[str, Any]) -> None:
        site.watch(name, event)
        reporter.report(event)

    with contextlib.closing(reporter):
        built = build(stage, replace(site, watch=watch), manifests, force=force)
    name = "Cached" if built.cached else "Completed"
    return Completed(name=name, message=built.uri, data=built)


def submit(stage: Stage, site: Site, inputs: Mapping[str, Any], *, force: bool) -> Any:
    """Start `stage` once the futures in `inputs` are there; returns its own future."""
    # No tags: for each one Prefect asks the server for a slot, and may wait two seconds to hear
    # that there is no limit. It types `submit` as taking values, not futures or quoted ones.
    named: Any = stage_task.with_options(name=stage.name, task_run_name=stage.name)
    return named.submit(quote(stage), quote(site), dict(inputs), force=force)
