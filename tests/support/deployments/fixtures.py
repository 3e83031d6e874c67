"""A Prefect server that was told everything."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.prefect.records import Server
from tests.support.deployments.prefect_api import PrefectApi
from tests.support.flows.pools import client


@pytest.fixture
def api(server: Server) -> Iterator[PrefectApi]:
    """The server's API."""
    with client() as asking:
        yield PrefectApi(asking)


@pytest.fixture(scope="session")
def deploy(server: Server) -> Callable[..., Any]:
    """Tells the server everything, again and again; what a test deletes, it has told once more."""
    from deployments.deploy import deploy_all

    deploy_all()
    return deploy_all
