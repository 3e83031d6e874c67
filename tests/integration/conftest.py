"""For integration tests: what every one of them would pay for again is paid for once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.infra.launch.fork_server import installed


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """A fork server for jobs that import torch; campaigns start every process as users do."""
    with installed():
        yield


@pytest.fixture(scope="session", autouse=True)
def one_authority(authority: Path) -> Iterator[None]:
    """Give clients of HTTP one certificate to read: no server of a test has one of the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(authority))
        yield
