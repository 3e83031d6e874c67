"""One stack for all tests of a module: it takes 20 seconds to come up on an idle machine."""

from collections.abc import Iterator

import pytest

from tests.support.infra.ports import quiet_port
from tests.support.infra.stack.live import LiveStack, make_code


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A stack that is up."""
    directory = tmp_path_factory.mktemp("stack")
    stack = LiveStack(directory / "home", code=make_code(directory / "code"))
    try:
        done = stack.up("--port", str(quiet_port()))
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        stack.deploy_toy()
        yield stack
    finally:
        stack.down()
    assert stack.processes() == []
