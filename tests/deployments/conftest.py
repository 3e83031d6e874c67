"""A Prefect server that was told everything."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from infra.prefect.records import Server
from tests.deployments.prefect_api import PrefectApi
from tests.prefect_login import Login


@pytest.fixture
def api(server: Server) -> Iterator[PrefectApi]:
    """The server's API."""
    with httpx.Client(base_url=server.api_url, auth=Login.to(server), timeout=60) as client:
        yield PrefectApi(client)


@pytest.fixture(scope="session")
def deploy(server: Server) -> Callable[..., Any]:
    """Tells the server everything, again and again; what a test deletes, it has told once more."""
    from deployments.deploy import deploy_all

    deploy_all()
    return deploy_all
