"""Pools, deployments, workers and runs of the tests, as Prefect's API shows them."""

import contextlib
import functools
from typing import Any

from tests.support.flows import waiting

SECONDS = 200.0  # a run on a busy machine takes a while to start
wait_until = functools.partial(waiting.wait_until, seconds=SECONDS, every=0.1)


def client() -> Any:
    """Prefect's client."""
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def deploy(pool: str) -> None:
    """Deploy `one-stage/<pool>`, for a test that plays the worker."""
    from flows.orchestration.one_stage import one_stage

    _make_pool(pool)
    deployment: Any = one_stage.to_deployment(pool, work_pool_name=pool)
    deployment.apply()


def _make_pool(pool: str) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    made = WorkPoolCreate(name=pool, type="process", base_job_template=template)
    with client() as asking, contextlib.suppress(ObjectAlreadyExists):
        asking.create_work_pool(made)
