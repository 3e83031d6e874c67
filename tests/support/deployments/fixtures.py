"""A Prefect server with all deployments and automations."""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infra.prefect.access import AUTH
from infra.prefect.server import Server
from tests.support.deployments.prefect_api import PrefectApi
from tests.support.flows.pools import client
from tests.support.serving import QuietHandler, serving


@pytest.fixture
def api(server: Server) -> Iterator[PrefectApi]:
    """The server's API."""
    with contextlib.closing(PrefectApi(server.api_url, password=os.environ.get(AUTH))) as api:
        yield api


@pytest.fixture(scope="session")
def deploy(server: Server) -> Callable[..., Any]:
    """Register everything; the function registers again what a test has deleted."""
    from deployments.deploy import deploy_all

    deploy_all()
    return deploy_all


@pytest.fixture
def posted(server: Server) -> Iterator[tuple[str, list[Any]]]:
    """An address, and what was posted to it; at the end the server has no alerts."""
    from deployments.alerts import ALERTS

    bodies: list[Any] = []

    class Receiver(QuietHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"]))
            bodies.append((self.headers["content-type"], json.loads(text)))
            self.reply(200)

    with serving(Receiver) as port:
        yield f"http://127.0.0.1:{port}/hook", bodies
    with client() as asking:
        for automation in itertools.chain(*map(asking.read_automations_by_name, ALERTS)):
            asking.delete_automation(automation.id)
