"""For integration tests: what every one of them would pay for again is paid for once."""

from collections.abc import Iterator

import pytest

from tests.support.infra.launch.fork_server import installed


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """A fork server for jobs that import torch; campaigns start every process as users do."""
    with installed():
        yield
