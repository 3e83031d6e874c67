"""For integration tests: what every one of them would pay for again is paid for once."""

import gc
from collections.abc import Iterator

import pytest

from tests.support.infra.launch.fork_server import installed


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """A fork server for jobs that import torch; campaigns start every process as users do."""
    with installed():
        yield


def pytest_collection_finish() -> None:
    """Take what is imported by now from the garbage collector, which would visit it all again."""
    gc.freeze()
    gc.unfreeze = lambda: None  # a training loop's end would give it all back
