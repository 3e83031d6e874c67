"""A work pool whose worker sends nothing for a while is posted."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.deployments.fixtures import api, deploy, posted
from tests.support.deployments.prefect_api import PrefectApi

__all__ = ["api", "deploy", "posted"]

pytestmark = pytest.mark.prefect


def test_a_pool_whose_worker_is_gone_is_posted(
    deploy: Callable[..., Any], api: PrefectApi, posted: tuple[str, list[Any]]
) -> None:
    url, bodies = posted
    deploy(webhook=url)
    worker = {"name": "short-lived", "heartbeat_interval_seconds": 2}
    api.post("/work_pools/gpu/workers/heartbeat", worker)
    assert api.get("/work_pools/gpu")["status"] == "READY"
    deadline = time.monotonic() + 120
    while not bodies and time.monotonic() < deadline:
        time.sleep(0.2)
    assert [body for _, body in bodies] == [{"text": "no worker runs for the work pool gpu"}]
